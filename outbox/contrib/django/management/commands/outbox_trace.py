"""`manage.py outbox_trace`: the way of one message."""

from __future__ import annotations

from typing import Any
from uuid import UUID

from django.core.management.base import CommandError, CommandParser

from outbox.broker.database.executor import Executor
from outbox.broker.operations.trace import trace
from outbox.contrib.django.databases import broker_connection
from outbox.contrib.django.management.output import OutboxCommand


class Command(OutboxCommand):
    """Parses, then calls trace."""

    help = "Show where a message or transaction is: stored, decided, queued, and how far each group is."

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("id", type=UUID, help="message or transaction id")
        self.add_json(parser)

    def handle(self, *args: Any, **options: Any) -> None:
        with broker_connection() as (connection, schema):
            found = trace(Executor(connection, schema), options["id"])
        if found is None:
            raise CommandError(f"the broker has no message or transaction {options['id']} (any more).")
        if options["json"]:
            self.print_json(found.as_json())
            return
        for section, value in found.as_json().items():
            rows = value if isinstance(value, list) else [value] if value else []
            for row in rows:
                text = ", ".join(f"{name} {cell}" for name, cell in row.items() if cell not in (None, ""))
                self.say(f"{section}: {text}")
