"""`manage.py outbox_compare`: compare the ledgers and inboxes of this project with the broker."""

from __future__ import annotations

import sys
from dataclasses import asdict
from typing import Any

from django.core.management.base import CommandParser

from outbox.broker.operations.comparisons import DatabaseComparison
from outbox.contrib.django.management.output import OutboxCommand
from outbox.contrib.django.operations.comparing import found, run_compare, settle


class Command(OutboxCommand):
    """Parses, then calls run_compare, or settle."""

    help = "Compare ledgers and inboxes with the broker. Exits with 2 if a restore has lost messages or effects."

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument(
            "--settle", action="store_true", help="mark the findings as settled, so that they are no condition any more"
        )
        self.add_no_input(parser)
        self.add_json(parser)

    def handle(self, *args: Any, **options: Any) -> None:
        counts = run_compare()
        settled = 0
        if options["settle"] and not options["dry_run"]:
            self.confirm(f"{sum(asdict(counts).values())} missing rows will be counted as settled.", options)
            settled = settle()
        left = [one for one in found() if not one.is_clean]
        if options["json"]:
            self.print_json({**asdict(counts), "settled": settled, "found": [_as_json(one) for one in left]})
        elif left:
            self.print_rows(
                ["kind", "group", "topic", "database", "missing", "first", "last", "some of them"],
                (
                    (
                        *(one.kind.value, one.subject, one.topic, one.alias, one.missing),
                        *(one.first_at or one.unproven_from, one.last_at or one.unproven_to),
                        ", ".join(map(str, one.ids[:3])),
                    )
                    for one in left
                ),
            )
        else:
            self.say("ledgers and inboxes agree with the broker", self.style.SUCCESS)
        if left:
            sys.exit(2)


def _as_json(one: DatabaseComparison) -> dict[str, Any]:
    return {name: value for name, value in asdict(one).items() if name != "state"}
