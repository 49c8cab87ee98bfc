"""`manage.py outbox_doctor`: finds problems before they occur, each with its remedy."""

from __future__ import annotations

import sys
from typing import Any

from django.core.management.base import CommandParser

from outbox.broker.operations.conditions import Severity
from outbox.contrib.django.management.output import OutboxCommand, first_line
from outbox.contrib.django.operations.doctor import examine


class Command(OutboxCommand):
    """Parses, then calls examine."""

    help = "Examine settings, databases, ledgers, server and declarations. Exits with 0, 1 (warning) or 2 (critical)."

    def add_arguments(self, parser: CommandParser) -> None:
        self.add_json(parser)

    def handle(self, *args: Any, **options: Any) -> None:
        found = sorted(examine(), key=lambda one: -one.severity)
        if options["json"]:
            self.print_json([{**_plain(one), "severity": one.severity.name.lower()} for one in found])
        else:
            for one in found:
                style = {Severity.OK: None, Severity.WARNING: self.style.WARNING}.get(one.severity, self.style.ERROR)
                self.say(f"{one.severity.name} {one.subject}: {first_line(one.text)}", style)
                if one.remedy:
                    self.say(f"    -> {one.remedy}")
        worst = max((one.severity for one in found), default=Severity.OK)
        if worst:
            sys.exit(int(worst))


def _plain(one: Any) -> dict[str, Any]:
    return {"subject": one.subject, "text": one.text, "remedy": one.remedy}
