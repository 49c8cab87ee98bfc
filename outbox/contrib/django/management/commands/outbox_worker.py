"""`manage.py outbox_worker`: the broker, the consumers and check-back without Celery."""

from __future__ import annotations

import signal
import sys
import threading
from typing import Any

from django.core.management.base import CommandError, CommandParser

from outbox.broker.process_log import write_log
from outbox.broker.supervisor import stop_on_signals
from outbox.contrib.django.management.output import OutboxCommand
from outbox.contrib.django.worker.drain import drain
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
            "--drain", action="store_true", help="do everything that is due now in this process, then end"
        )

    def handle(self, *args: Any, **options: Any) -> None:
        if options["group"] and (options["role"] != "consumer" or options["drain"]):
            raise CommandError("--group needs --role consumer: only a consumer can be limited to groups.")
        if options["drain"] and options["role"] != "all":
            raise CommandError("--drain does what every role would do: leave --role out.")
        if options["drain"]:
            counts = drain()
            self.say(f"{counts.queued} messages queued, {counts.handled} deliveries handled")
            return
        write_log("worker")
        stop = threading.Event()
        before = stop_on_signals(stop)
        try:
            ROLES[options["role"]](stop, options["group"])
        except KeyboardInterrupt:
            sys.exit(128 + signal.SIGINT)
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
