"""`manage.py outbox_health`: a cheap probe of the broker, or of a worker's processes by their heartbeat files."""

from __future__ import annotations

import sys
from typing import Any

from django.core.management.base import CommandError, CommandParser

from outbox.contrib.django.management.output import OutboxCommand
from outbox.contrib.django.operations.watching import probe
from outbox.contrib.django.settings.conf import get_settings
from outbox.contrib.django.worker.probes import live, ready


class Command(OutboxCommand):
    """Parses, then calls one of the probes."""

    help = (
        "Say whether messages are delivered; with --live and --ready, whether this machine's worker runs. Exits "
        "with 0 or 1."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        asked = parser.add_mutually_exclusive_group()
        asked.add_argument("--live", action="store_true", help="every process has a recent heartbeat; asks no database")
        asked.add_argument("--ready", action="store_true", help="and every process can work")
        self.add_json(parser)

    def handle(self, *args: Any, **options: Any) -> None:
        if (options["live"] or options["ready"]) and not get_settings().health_directory:
            raise CommandError("OUTBOX['HEALTH_DIRECTORY'] is not set, so the worker writes no heartbeats: set it.")
        found = live() if options["live"] else ready() if options["ready"] else probe()
        if options["json"]:
            self.print_json({"healthy": found.is_healthy, "problems": list(found.problems)})
        else:
            self.say("healthy" if found.is_healthy else "; ".join(found.problems))
        if not found.is_healthy:
            sys.exit(1)
