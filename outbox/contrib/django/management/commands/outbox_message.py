"""`manage.py outbox_message`: shows messages, and acts on them. `show` prints the path of one message."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from uuid import UUID

from django.core.management.base import CommandError, CommandParser

from outbox.broker.operations.trace import trace
from outbox.contrib.django.database.aliases import on_broker
from outbox.contrib.django.management.acting import OperatorCommand
from outbox.contrib.django.operations.claimed_messages import claimed_messages


class Command(OperatorCommand):
    help = "Show messages, and act on them."

    def add_arguments(self, parser: CommandParser) -> None:
        subcommands = self.add_subcommands(parser)
        shown = subcommands.add_parser(
            "show", help="show where a message is: stored, decided, queued, and the progress of each group"
        )
        shown.add_argument("id", type=UUID, help="message or transaction id")
        self.add_json(shown)

    def _show(self, options: dict[str, Any]) -> None:
        sections = self._path(options["id"])
        if options["json"]:
            self.print_json(sections)
            return
        for section, value in sections.items():
            rows = value if isinstance(value, list) else [value] if value else []
            for row in rows:
                error, *rest = str(row.get("error") or "").splitlines() or [""]
                cells = {**row, "error": error}
                text = ", ".join(f"{name} {cell}" for name, cell in cells.items() if cell not in (None, ""))
                self.say(f"{section}: {text}")
                for line in rest:
                    self.say(f"    {line}")

    @staticmethod
    def _path(message_id: UUID) -> Mapping[str, Any]:
        found = on_broker(trace, message_id)
        if found is None:
            raise CommandError(
                f"the broker has no message or transaction {message_id}: it was never stored, or retention removed it."
            )
        return {**found.as_json(), **claimed_messages([UUID(one.message_id) for one in found.messages])}
