"""`manage.py outbox_receive`: stores foreign messages, as OUTBOX['RECEIVE'] declares."""

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
    """Parses, then receives until SIGTERM or SIGINT, or until no message comes."""

    help = "Receive foreign messages and store them, as OUTBOX['RECEIVE'] declares, until SIGTERM."

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("name", nargs="*", help="only these entries of OUTBOX['RECEIVE']")
        parser.add_argument("--once", action="store_true", help="end when no message has come for two seconds")

        parser.add_argument(
            "--forget",
            action="store_true",
            help="delete the state of the named entries: their absence is no condition any more",
        )

    def handle(self, *args: Any, **options: Any) -> None:
        if options["forget"]:
            if not options["name"] or options["once"]:
                raise CommandError(
                    "--forget needs the names of entries that are no longer received, and no other option."
                )
            self.say(f"{forget_receivers(options['name'])} receivers forgotten")
            return
        if options["once"]:
            done = receive_once(names=options["name"])
            self.say(f"{done.stored} messages stored, {done.put_aside} put into the poison topic")
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
