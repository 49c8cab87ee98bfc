"""`manage.py outbox_message list|show|recall|redeliver`."""

from __future__ import annotations

from typing import Any
from uuid import UUID

from django.core.management.base import CommandError, CommandParser

from outbox.broker.database.executor import Executor
from outbox.broker.log.topics import TopicCatalog
from outbox.broker.operations.search import browse, find_messages
from outbox.broker.operations.trace import trace
from outbox.contrib.django.database.aliases import broker_connection
from outbox.contrib.django.engine.operator_table import is_on_rocketmq
from outbox.contrib.django.management.acting import ActionCommand
from outbox.contrib.django.management.output import moment
from outbox.contrib.django.operations.claimed_messages import claimed_messages
from outbox.contrib.django.settings.conf import get_settings
from outbox.utils.safe_text import masked_names

# In the table, the command shows at most this many characters of each body. With --json, the command prints the whole
# body.
_SHOWN_CHARACTERS = 60


class Command(ActionCommand):
    """Parses the arguments, then calls the function of the chosen subcommand."""

    help = (
        "List the stored messages of a topic or key, show the path of one message, recall waiting messages, or "
        "deliver a message again to one group."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        subcommands = self.add_subcommands(parser)
        stored = subcommands.add_parser(
            "list", help="list the messages of a topic, or with a key, newest first; moves no offset and locks nothing"
        )
        stored.add_argument("topic", nargs="?")
        stored.add_argument("--key", help="list the messages with this business key, in any state")
        stored.add_argument(
            "--uncommitted", action="store_true", help="also list undecided, rolled back and recalled messages"
        )
        stored.add_argument("--since", type=moment, help="list messages stored after this time (default: one day ago)")
        self.add_page(stored, "LOG_ID", "list messages that were stored before the message with this log id", int)
        self.add_json(stored)
        shown = subcommands.add_parser(
            "show", help="show where a message is: stored, decided, queued, and the progress of each group"
        )
        shown.add_argument("id", type=UUID, help="message or transaction id")
        self.add_json(shown)

    def _list(self, options: dict[str, Any]) -> None:
        if is_on_rocketmq():
            self._list_of_server(options)
            return
        if options["key"] is not None:
            self._list_key(options)
            return
        if options["topic"] is None:
            raise CommandError("name a topic, or pass --key.")
        narrowed = {name: options[name] for name in ("uncommitted", "since", "after", "limit")}
        with broker_connection() as (connection, schema):
            TopicCatalog(schema).get(connection, options["topic"])
            found = browse(Executor(connection, schema), options["topic"], **narrowed)
        names = masked_names(get_settings().masked_fields, options["topic"])
        found = [one.without(names) for one in found] if names else found
        if options["json"]:
            self.print_json([one.as_json() for one in found])
            return
        self.print_rows(
            ["log id", "message", "key", "tag", "stored", "state", "body"],
            (
                (one.log_id, one.message_id, one.key, one.tag, one.stored_at, one.state, one.text()[:_SHOWN_CHARACTERS])
                for one in found
            ),
        )
        self.say_more(len(found), options["limit"], found[-1].log_id if found else None)

    def _list_key(self, options: dict[str, Any]) -> None:
        with broker_connection() as (connection, schema):
            narrowed = {name: options[name] for name in ("topic", "since", "limit")}
            # This list begins with the newest message, so the next page has older messages.
            found = find_messages(Executor(connection, schema), options["key"], before=options["after"], **narrowed)
        if options["json"]:
            self.print_json(found)
            return
        self.print_rows(
            ["message", "topic", "tag", "stored", "state"],
            ((one.message_id, one.topic, one.tag, one.stored_at, one.state) for one in found),
        )
        self.say_more(len(found), options["limit"], found and found[-1].log_id)

    def _list_of_server(self, options: dict[str, Any]) -> None:
        from outbox.contrib.django.operations import rocketmq
        from outbox.rocketmq import inspection

        if lacking := [f"--{name}" for name in ("uncommitted", "since", "after") if options[name]]:
            raise CommandError(
                f"RocketMQ does not list messages by {', '.join(lacking)}: leave it out. `outbox_transaction list` "
                "shows uncommitted messages."
            )
        if options["key"] is not None:
            found = rocketmq.messages_with_key(options["key"], options["topic"])[-options["limit"] :][::-1]
        elif options["topic"] is None:
            raise CommandError("name a topic, or pass --key.")
        else:
            found = inspection.newest(rocketmq.brokers(), options["topic"], options["limit"])
        if options["json"]:
            self.print_json(rocketmq.MessagePath(copies=found, ledger={}, handled=[], letters=[]).sections()["copies"])
            return
        self.print_rows(
            ["message", "topic", "key", "tag", "stored", "place", "broker", "queue", "offset"],
            (
                (m.message_id, m.topic, m.key, m.tag, one.stored_at, one.place, one.broker, one.queue, one.offset)
                for one in found
                for m in [one.message]
            ),
        )
        self.say_more(len(found), options["limit"])

    def _show(self, options: dict[str, Any]) -> None:
        sections = self._path_on_server(options["id"]) if is_on_rocketmq() else self._path(options["id"])
        if options["json"]:
            self.print_json(sections)
            return
        for section, value in sections.items():
            rows = value if isinstance(value, list) else [value] if value else []
            for row in rows:
                text = ", ".join(f"{name} {cell}" for name, cell in row.items() if cell not in (None, ""))
                self.say(f"{section}: {text}")

    @staticmethod
    def _path_on_server(message_id: UUID) -> dict[str, Any]:
        from outbox.contrib.django.operations.rocketmq import find_path

        found = find_path(message_id)
        if found is None:
            raise CommandError(
                f"RocketMQ has no message {message_id} on the topics of this project, and no group has handled it: it "
                "was never stored, its transaction was rolled back, or RocketMQ has deleted it (fileReservedTime)."
            )
        return dict(found.sections())

    @staticmethod
    def _path(message_id: UUID) -> dict[str, Any]:
        with broker_connection() as (connection, schema):
            found = trace(Executor(connection, schema), message_id)
        if found is None:
            raise CommandError(
                f"the broker has no message or transaction {message_id}: it was never stored, or retention removed it."
            )
        claimed = claimed_messages([UUID(one.message_id) for one in found.messages])
        return {**found.as_json(), **{name: rows for name, rows in claimed.as_json().items() if rows}}
