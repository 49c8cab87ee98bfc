"""`manage.py outbox_forward`: sends the messages of OUTBOX['FORWARD'] to webhooks and other brokers."""

from __future__ import annotations

import signal
import sys
import threading
from typing import Any

from django.core.management.base import CommandParser

from outbox.broker.process_log import write_log
from outbox.broker.supervisor import HUNG_EXIT_CODE, end_within, stop_on_signals
from outbox.contrib.django.management.output import OutboxCommand
from outbox.contrib.django.worker.forwarding import forward_once, run_forward
from outbox.errors import HandlersHung


class Command(OutboxCommand):
    """Parses, then forwards until SIGTERM or SIGINT, or once."""

    help = "Forward messages as OUTBOX['FORWARD'] declares until SIGTERM, then finish the sends in progress."

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("group", nargs="*", help="only these groups of OUTBOX['FORWARD']")
        parser.add_argument("--once", action="store_true", help="send what is queued now, then end")

    def handle(self, *args: Any, **options: Any) -> None:
        if options["once"]:
            counts = forward_once(groups=options["group"])
            self.say(f"{counts.handled} messages forwarded, {counts.failed} attempts failed")
            return
        write_log("forward")
        stop = threading.Event()
        before = stop_on_signals(stop)
        try:
            run_forward(stop, groups=options["group"])
        except HandlersHung:
            end_within(5.0, HUNG_EXIT_CODE)
            raise
        except KeyboardInterrupt:
            sys.exit(128 + signal.SIGINT)
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
