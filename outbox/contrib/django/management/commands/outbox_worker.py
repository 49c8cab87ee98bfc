"""`manage.py outbox_worker`: the broker, the consumers and check-back without Celery."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Sequence
from typing import Any

from django.core.management.base import CommandError, CommandParser

from outbox.broker.process_log import write_log
from outbox.broker.supervisor import stop_on_signals
from outbox.contrib.django.management.output import OutboxCommand
from outbox.contrib.django.worker.drain import drain, run_until_drained
from outbox.contrib.django.worker.workers import ROLES


class Command(OutboxCommand):
    """Parses, then runs one role until SIGTERM or SIGINT, or everything once."""

    help = "Run the broker, the consumers and check-back until SIGTERM, then drain."

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument(
            "--role",
            choices=sorted(ROLES),
            default="all",
            help="all (default): supervise one process for broker and check, and the consumer processes",
        )
        parser.add_argument("--group", action="append", default=[], help="consumer: only this group (repeatable)")
        parser.add_argument(
            "--drain", action="store_true", help="do all work that is due now in this process, then end"
        )
        parser.add_argument(
            "--until-drained",
            action="store_true",
            help="end when no message of this project waits on the broker any more: to move to another broker",
        )
        parser.add_argument(
            "--rocketmq-broker",
            action="append",
            default=[],
            metavar="HOST:PORT",
            help="--until-drained on RocketMQ: the administration port of a broker (listenPort, 10911); repeatable",
        )

    def handle(self, *args: Any, **options: Any) -> None:
        _refuse(options)
        if options["drain"]:
            counts = drain()
            self.say(f"{counts.queued} messages queued, {counts.handled} deliveries handled")
            return
        write_log("worker")
        stop = threading.Event()
        before = stop_on_signals(stop)
        try:
            if options["until_drained"]:
                self._until_drained(stop, options["rocketmq_broker"])
            else:
                ROLES[options["role"]](stop, options["group"])
        except KeyboardInterrupt:
            sys.exit(128 + signal.SIGINT)
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _until_drained(self, stop: threading.Event, brokers: Sequence[str]) -> None:
        left = run_until_drained(stop, brokers)
        if left.waiting:
            raise CommandError(f"stopped before the broker was drained: {'; '.join(left.waiting)}.")
        if staying := "; ".join(left.staying):
            raise CommandError(f"no message waits on the broker any more, but an operator must decide: {staying}.")
        self.say("nothing is left on the broker")


def _refuse(options: dict[str, Any]) -> None:
    """Raise CommandError for options that cannot be combined."""
    everything = options["drain"] or options["until_drained"]
    if options["group"] and (options["role"] != "consumer" or everything):
        raise CommandError("--group needs --role consumer: only a consumer can be limited to groups.")
    if everything and options["role"] != "all":
        option = "--drain" if options["drain"] else "--until-drained"
        raise CommandError(f"{option} does the work of every role: leave --role out.")
    if options["drain"] and options["until_drained"]:
        raise CommandError(
            "--drain does the work that is due now, --until-drained also waits for later work: give one of them."
        )
    if options["rocketmq_broker"] and not options["until_drained"]:
        raise CommandError("--rocketmq-broker needs --until-drained.")
