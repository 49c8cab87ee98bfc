"""`manage.py outbox_transaction`: shows open transactions, and acts on them. `check` answers the due checks."""

from __future__ import annotations

import dataclasses
from typing import Any

from django.core.management.base import CommandParser

from outbox.contrib.django.management.acting import OperatorCommand
from outbox.contrib.django.publishing.checkback import run_check_back


class Command(OperatorCommand):
    """Parses the arguments, then calls the function of the chosen subcommand."""

    help = "Show the open transactions of the broker, and act on them."

    def add_arguments(self, parser: CommandParser) -> None:
        check = self.add_subcommands(parser).add_parser(
            "check", help="run one pass of check-back, as a worker does: answer the due checks of this producer group"
        )
        check.add_argument(
            "--parked", action="store_true", help="also check parked transactions, even if they are not due yet"
        )
        self.add_json(check)

    def _check(self, options: dict[str, Any]) -> None:
        counts = dataclasses.asdict(run_check_back(parked=options["parked"]))
        if options["json"]:
            self.print_json(counts)
        else:
            self.say(", ".join(f"{number} {name.replace('_', ' ')}" for name, number in counts.items()))
