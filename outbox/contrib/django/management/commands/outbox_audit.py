"""`manage.py outbox_audit`: checks that every message is counted in exactly one place."""

from __future__ import annotations

import sys
from dataclasses import asdict
from typing import Any

from django.core.management.base import CommandParser

from outbox.broker.operations.comparisons import DatabaseComparison
from outbox.contrib.django.management.acting import OperatorCommand
from outbox.contrib.django.operations.comparing import losses, run_compare
from outbox.contrib.django.operations.watching import run_audit


class Command(OperatorCommand):
    help = (
        "Count every message by state, and check that the counts agree. The command stores the result, and the "
        "status shows it. Exits with 2 if an equation fails, or if `compare` finds that a restore has lost messages "
        "or effects."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        self.add_json(parser)
        subcommands = self.add_subcommands(parser, required=False)
        self.add_json(subcommands.add_parser("compare", help="compare ledgers and inboxes with the broker"))

    def handle(self, *args: Any, **options: Any) -> None:
        super().handle(*args, **{**options, "action": options["action"] or "count"})

    def _count(self, options: dict[str, Any]) -> None:
        counted = run_audit()
        if options["json"]:
            self.print_json(counted)
        else:
            for text in counted["differences"]:
                self.say(text, self.style.ERROR)
            sent = sum(topic["sent"] for topic in counted["facts"]["topics"].values())
            outcome = "not conserved" if counted["differences"] else "every equation holds"
            self.say(f"{sent} messages counted in {counted['took_seconds']:.1f} s: {outcome}")
        if counted["differences"]:
            sys.exit(2)

    def _compare(self, options: dict[str, Any]) -> None:
        counts = run_compare()
        left = losses()
        if options["json"]:
            self.print_json({**asdict(counts), "found": [_as_json(one) for one in left]})
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
