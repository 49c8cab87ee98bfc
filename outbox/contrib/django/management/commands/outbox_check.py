"""`manage.py outbox_check`: one check-back pass."""

from __future__ import annotations

import dataclasses
from typing import Any

from django.core.management.base import CommandParser

from outbox.contrib.django.management.output import OutboxCommand
from outbox.contrib.django.publishing.checkback import run_check_back


class Command(OutboxCommand):
    """Parses, then calls run_check_back."""

    help = "Answer once the broker's due checks of this producer group."

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("--parked", action="store_true", help="also the parked ones, before they are due")
        self.add_json(parser)

    def handle(self, *args: Any, **options: Any) -> None:
        counts = dataclasses.asdict(run_check_back(parked=options["parked"]))
        if options["json"]:
            self.print_json(counts)
        else:
            self.say(", ".join(f"{number} {name.replace('_', ' ')}" for name, number in counts.items()))
