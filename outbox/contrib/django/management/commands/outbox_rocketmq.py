"""`manage.py outbox_rocketmq`: compare RocketMQ's topics with the declared ones, and create missing ones."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any, Final, cast

from django.core.management.base import CommandError, CommandParser

from outbox.contrib.django.engine.broker import get_engine
from outbox.contrib.django.engine.rocketmq import RocketMQEngine
from outbox.contrib.django.management.output import OutboxCommand
from outbox.contrib.django.settings.conf import EngineName, get_settings
from outbox.contrib.django.subscribers.registry import autodiscover

# The proxy caches for about 20 s that a topic was missing, or its former type.
_SETTLE_SECONDS: Final = 30.0
_PAUSE_SECONDS: Final = 0.5


class Command(OutboxCommand):
    """Without --create it changes nothing, and fails if a declared topic is missing or of another type."""

    help = "Check the declared topics on RocketMQ; with --create, create them and the consumer groups."

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument(
            "--create",
            metavar="HOST:PORT",
            help="the administration port of a broker (listenPort, 10911): create topics and groups there first",
        )

    def handle(self, *args: Any, **options: Any) -> None:
        settings = get_settings()
        if settings.engine is not EngineName.ROCKETMQ:
            raise CommandError("OUTBOX['BROKER'] is not a RocketMQ address: see docs/engines.md.")
        engine = cast(RocketMQEngine, get_engine())
        autodiscover()
        engine.require()
        if options["create"]:
            topics, subscriptions = engine.create(options["create"])
            self.say(f"created or updated: {topics} topics, {subscriptions} subscriptions")
        if problems := _problems(engine.server_problems, _SETTLE_SECONDS if options["create"] else 0.0):
            raise CommandError("\n".join(problems))
        self.say(f"RocketMQ has the declared topics: {', '.join(sorted(settings.topics)) or 'none'}")
        if given_up := engine.given_up():
            raise CommandError(
                f"RocketMQ gave up asking about {given_up} messages of producer group {settings.producer_group!r}, and "
                "the ledger has not decided them yet: start outbox_worker. If a worker runs, its log names the "
                "transactions and the reason."
            )


def _problems(look: Callable[[], Iterable[str]], seconds: float) -> list[str]:
    """The problems that remain after checking again for this long."""
    deadline = time.monotonic() + seconds
    while (problems := list(look())) and time.monotonic() < deadline:
        time.sleep(_PAUSE_SECONDS)
    return problems
