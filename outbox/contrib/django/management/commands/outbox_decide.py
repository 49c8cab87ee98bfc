"""`manage.py outbox_decide`: an operator decides a parked transaction."""

from __future__ import annotations

from typing import Any, Final
from uuid import UUID

from django.core.management.base import CommandParser

from outbox.contrib.django.management.output import OutboxCommand
from outbox.contrib.django.operations.commands import decide, rehearse
from outbox.transaction import Decision

_FORCED: Final = (
    "{} will be decided as {} without asking the ledger: a wrong COMMIT delivers a message about a write that never "
    "happened, a wrong ROLLBACK loses a message."
)


class Command(OutboxCommand):
    """Parses, then calls decide, or rehearse."""

    help = "Commit or roll back an undecided transaction. The ledger must agree, or pass --force."

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("id", type=UUID, help="transaction id")
        parser.add_argument("decision", choices=["commit", "rollback"])
        parser.add_argument("--force", action="store_true", help="without asking the ledger; needs a confirmation")
        self.add_no_input(parser, "show what the ledger says, decide nothing")
        self.add_json(parser)

    def handle(self, *args: Any, **options: Any) -> None:
        decision = Decision.COMMIT if options["decision"] == "commit" else Decision.ROLLBACK
        if options["force"] and not options["dry_run"]:
            rehearse(options["id"], decision, force=True)
            self.confirm(_FORCED.format(options["id"], decision.name), options)
        act = rehearse if options["dry_run"] else decide
        outcome = str(act(options["id"], decision, force=options["force"]))
        if options["json"]:
            named = {"transaction_id": options["id"], "decision": options["decision"]}
            self.print_json({**named, "outcome": outcome, "dry_run": options["dry_run"]})
        elif options["dry_run"]:
            self.say(f"{decision.name} of {options['id']}: nothing was decided (--dry-run); {outcome}.")
        else:
            self.say(f"{decision.name} of {options['id']}: {outcome}.")
