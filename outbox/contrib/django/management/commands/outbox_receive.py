"""`manage.py outbox_receive`: stores what others have sent, as OUTBOX['RECEIVE'] declares."""

from __future__ import annotations

import signal
import sys
import threading
from typing import Any

from django.core.management.base import CommandError, CommandParser

from outbox.broker.process_log import write_log
from outbox.broker.supervisor import stop_on_signals
from outbox.contrib.django.management.output import OutboxCommand
from outbox.contrib.django.worker.receiving import forget_receivers, receive_once, run_receive


class Command(OutboxCommand):
    """Parses, then receives until SIGTERM or SIGINT, or until nothing comes."""

    help = "Store what others have sent, as OUTBOX['RECEIVE'] declares, until SIGTERM."

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("name", nargs="*", help="only these entries of OUTBOX['RECEIVE']")
        parser.add_argument("--once", action="store_true", help="end when nothing has come for two seconds")

        parser.add_argument(
            "--forget", action="store_true", help="the entries named are gone for good: their absence is no condition"
        )

    def handle(self, *args: Any, **options: Any) -> None:
        if options["forget"]:
            if not options["name"] or options["once"]:
                raise CommandError("--forget goes with the names of what is not received any more, and nothing else.")
            self.say(f"{forget_receivers(options['name'])} receivers forgotten")
            return
        if options["once"]:
            done = receive_once(names=options["name"])
            self.say(f"{done.stored} messages stored, {done.put_aside} put aside")
            return
        write_log("receive")
        stop = threading.Event()
        before = stop_on_signals(stop)
        try:
            run_receive(stop, names=options["name"])
        except KeyboardInterrupt:
            sys.exit(128 + signal.SIGINT)
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
