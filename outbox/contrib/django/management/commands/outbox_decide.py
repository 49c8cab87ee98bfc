"""`manage.py outbox_decide`: an operator decides a parked transaction."""

from __future__ import annotations

from typing import Any
from uuid import UUID

from django.core.management.base import CommandParser

from outbox.contrib.django.management.output import OutboxCommand
from outbox.contrib.django.operations import decide
from outbox.transaction import Decision


class Command(OutboxCommand):
    """Parses, then calls decide."""

    help = "Commit or roll back a transaction that nobody decided. The ledger has to agree, or --force."

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("id", type=UUID, help="transaction id")
        parser.add_argument("decision", choices=["commit", "rollback"])
        parser.add_argument("--force", action="store_true", help="without asking the ledger")

    def handle(self, *args: Any, **options: Any) -> None:
        decision = Decision.COMMIT if options["decision"] == "commit" else Decision.ROLLBACK
        status = decide(options["id"], decision, force=options["force"])
        self.say(f"{decision.name} of {options['id']}: {status}.")
