"""`manage.py outbox_audit`: is every message accounted for?"""

from __future__ import annotations

import sys
from typing import Any

from django.core.management.base import CommandParser

from outbox.contrib.django.management.output import OutboxCommand
from outbox.contrib.django.operations.watching import run_audit


class Command(OutboxCommand):
    """Parses, then calls run_audit."""

    help = (
        "Count every message by state and compare. The result is stored for the status. Exits with 2 if an equation "
        "fails."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        self.add_json(parser)

    def handle(self, *args: Any, **options: Any) -> None:
        found = run_audit()
        if options["json"]:
            self.print_json(found)
        else:
            for text in found["differences"]:
                self.say(text, self.style.ERROR)
            counted = sum(topic["sent"] for topic in found["facts"]["topics"].values())
            outcome = "not conserved" if found["differences"] else "every equation holds"
            self.say(f"{counted} messages counted in {found['took_seconds']:.1f} s: {outcome}")
        if found["differences"]:
            sys.exit(2)
