"""`manage.py outbox_relay list|retry|discard`."""

from __future__ import annotations

from typing import Any

from django.core.management.base import CommandParser

from outbox.contrib.django.ledger.relay_rows import first_rows, relay_aliases
from outbox.contrib.django.management.acting import ActionCommand
from outbox.contrib.django.models import RelayEntry

_LIMIT = 100


class Command(ActionCommand):
    """Parses the arguments, then calls the function of the chosen subcommand."""

    help = "List the messages that wait for the relay to RocketMQ, send a rejected one again, or discard one."

    def add_arguments(self, parser: CommandParser) -> None:
        listing = self.add_subcommands(parser).add_parser("list", help="list the oldest waiting messages")
        listing.add_argument("--limit", type=int, default=_LIMIT, help=f"rows per database (default {_LIMIT})")
        self.add_json(listing)

    def _list(self, options: dict[str, Any]) -> None:
        found = [(alias, row) for alias in relay_aliases() for row in first_rows(alias, options["limit"])]
        if options["json"]:
            self.print_json([_as_json(alias, row) for alias, row in found])
            return
        self.print_rows(
            ["database", "message", "topic", "key", "state", "published", "attempts", "error"],
            (
                (
                    alias,
                    str(row.message_id),
                    row.topic,
                    row.key or "-",
                    row.state,
                    row.born_at.isoformat(sep=" ", timespec="seconds"),
                    str(row.attempts),
                    row.error or "-",
                )
                for alias, row in found
            ),
        )


def _as_json(alias: str, row: RelayEntry) -> dict[str, Any]:
    return {
        "database": alias,
        "message_id": str(row.message_id),
        "transaction_id": str(row.transaction_id),
        "topic": row.topic,
        "key": row.key,
        "state": row.state,
        "born_at": row.born_at.isoformat(),
        "deliver_at": row.deliver_at and row.deliver_at.isoformat(),
        "attempts": row.attempts,
        "error": row.error,
    }
