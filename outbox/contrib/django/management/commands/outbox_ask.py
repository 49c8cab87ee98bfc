"""`manage.py outbox_ask`: make the checks of undecided transactions due now."""

from __future__ import annotations

from typing import Any
from uuid import UUID

from django.core.management.base import CommandError, CommandParser

from outbox.contrib.django.management.output import OutboxCommand, positive
from outbox.contrib.django.operations.commands import ask_again


class Command(OutboxCommand):
    """Parses, then calls ask_again."""

    help = (
        "Have undecided transactions checked with the next pass of check-back, in the service that has their "
        "producer group. `outbox_check` answers for this service at once."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("ids", nargs="*", type=UUID, help="transaction ids")
        parser.add_argument("--group", help="those of this producer group")
        parser.add_argument("--parked", action="store_true", help="only parked ones")
        parser.add_argument("--all", action="store_true", help="of every group, parked or not")
        parser.add_argument("--limit", type=positive, default=10_000, help="at most so many, oldest first")
        self.add_dry_run(parser, "list the transactions, change nothing")
        self.add_json(parser)

    def handle(self, *args: Any, **options: Any) -> None:
        selects = options["group"] is not None or options["parked"]
        if sum((bool(options["ids"]), selects, options["all"])) != 1:
            raise CommandError("name transaction ids, or select by --group and --parked, or pass --all.")
        wanted = {name: options[name] for name in ("group", "parked", "limit", "dry_run")}
        asked = ask_again(options["ids"], **wanted)
        if options["json"]:
            self.print_json({"transaction_ids": asked, "count": len(asked), "dry_run": options["dry_run"]})
            return
        would = "would be" if options["dry_run"] else "are"
        self.say(f"{len(asked)} transactions {would} due for a check now.")
        self.say_more(len(asked), options["limit"])
