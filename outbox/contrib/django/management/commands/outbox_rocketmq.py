"""`manage.py outbox_rocketmq`: compare RocketMQ's topics with the declared ones, and create missing ones."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any, Final

from django.core.management.base import CommandError, CommandParser

from outbox.contrib.django.engine.broker import get_broker
from outbox.contrib.django.engine.engines import require_engine
from outbox.contrib.django.management.output import OutboxCommand
from outbox.contrib.django.settings.conf import get_settings
from outbox.contrib.django.subscribers.registry import autodiscover, subscribers

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
        if not settings.is_rocketmq:
            raise CommandError("OUTBOX['BROKER'] is not a RocketMQ address: see docs/engines.md.")
        autodiscover()
        require_engine(settings)
        if options["create"]:
            self._create(options["create"])
        from outbox.rocketmq.broker import RocketMQBroker

        broker = get_broker()
        assert isinstance(broker, RocketMQBroker)
        if problems := _problems(broker.topic_problems, _SETTLE_SECONDS if options["create"] else 0.0):
            raise CommandError("\n".join(problems))
        self.say(f"RocketMQ has the declared topics: {', '.join(sorted(settings.topics)) or 'none'}")
        self._refuse_given_up(settings.broker, settings.required_producer_group())

    def _refuse_given_up(self, url: str, producer_group: str) -> None:
        """Raise CommandError if RocketMQ gave up transactions that the ledger has not decided yet."""
        from outbox.rocketmq.admin import brokers_of
        from outbox.rocketmq.exhausted import waiting

        if given_up := sum(waiting(broker, producer_group) for broker in brokers_of(url)):
            raise CommandError(
                f"RocketMQ gave up asking about {given_up} messages of producer group {producer_group!r}, and the "
                "ledger has not decided them yet: start outbox_worker. If a worker runs, its log names the "
                "transactions and the reason."
            )

    def _create(self, address: str) -> None:
        from outbox.rocketmq.admin import parse_address

        admin = parse_address(address)
        topics = {name: declared.topic for name, declared in get_settings().topics.items()}
        for topic in topics.values():
            admin.create_topic(topic)
        for item in subscribers():
            if item.subscription.topic not in topics:
                raise CommandError(f"{item.name} subscribes to {item.subscription.topic!r}: declare it in TOPICS.")
            admin.create_group(item.subscription, topics[item.subscription.topic])
        self.say(f"created or updated: {len(topics)} topics, {len(subscribers())} subscriptions")


def _problems(look: Callable[[], Iterable[str]], seconds: float) -> list[str]:
    """The problems that remain after checking again for this long."""
    deadline = time.monotonic() + seconds
    while (problems := list(look())) and time.monotonic() < deadline:
        time.sleep(_PAUSE_SECONDS)
    return problems
