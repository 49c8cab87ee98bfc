"""`manage.py outbox_trace`: the path of one message."""

from __future__ import annotations

from typing import Any
from uuid import UUID

from django.core.management.base import CommandError, CommandParser

from outbox.broker.database.executor import Executor
from outbox.broker.operations.search import find_messages
from outbox.broker.operations.trace import trace
from outbox.contrib.django.database.aliases import broker_connection
from outbox.contrib.django.management.output import OutboxCommand, moment


class Command(OutboxCommand):
    """Parses, then calls trace, or find_messages."""

    help = "Show where a message or transaction is: stored, decided, queued, and the progress of each group."

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("id", type=UUID, nargs="?", help="message or transaction id")
        parser.add_argument("--key", help="instead: list the messages with this business key, newest first")
        parser.add_argument("--topic", help="with --key: only of this topic")
        parser.add_argument("--since", type=moment, help="with --key: stored since then (default: in the last day)")
        self.add_page(parser, "LOG_ID", "with --key: the page after this message", int)
        self.add_json(parser)

    def handle(self, *args: Any, **options: Any) -> None:
        if (options["id"] is None) == (options["key"] is None):
            raise CommandError("name a message or transaction id, or pass --key.")
        if options["key"] is not None:
            self._list(options)
        else:
            self._trace(options)

    def _list(self, options: dict[str, Any]) -> None:
        with broker_connection() as (connection, schema):
            narrowed = {name: options[name] for name in ("topic", "since", "limit")}
            # Newest first, so the next page is older.
            found = find_messages(Executor(connection, schema), options["key"], before=options["after"], **narrowed)
        if options["json"]:
            self.print_json(found)
            return
        self.print_rows(
            ["message", "topic", "tag", "stored", "state"],
            ((one.message_id, one.topic, one.tag, one.stored_at, one.state) for one in found),
        )
        self.say_more(len(found), options["limit"], found and found[-1].log_id)

    def _trace(self, options: dict[str, Any]) -> None:
        with broker_connection() as (connection, schema):
            found = trace(Executor(connection, schema), options["id"])
        if found is None:
            raise CommandError(
                f"the broker has no message or transaction {options['id']}: it never had it, or retention removed it."
            )
        if options["json"]:
            self.print_json(found.as_json())
            return
        for section, value in found.as_json().items():
            rows = value if isinstance(value, list) else [value] if value else []
            for row in rows:
                text = ", ".join(f"{name} {cell}" for name, cell in row.items() if cell not in (None, ""))
                self.say(f"{section}: {text}")
