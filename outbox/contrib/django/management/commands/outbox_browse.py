"""`manage.py outbox_browse`: the stored messages of a topic."""

from __future__ import annotations

from typing import Any

from django.core.management.base import CommandParser

from outbox.broker.database.executor import Executor
from outbox.broker.log.topics import TopicCatalog
from outbox.broker.operations.search import browse
from outbox.contrib.django.database.aliases import broker_connection
from outbox.contrib.django.management.output import OutboxCommand, moment
from outbox.contrib.django.settings.conf import get_settings
from outbox.utils.safe_text import masked_names

# The part of a body in a line of the table; --json has all of it.
_SHOWN_CHARACTERS = 60


class Command(OutboxCommand):
    """Parses, then calls browse."""

    help = "Show the stored messages of a topic, newest first. Changes no offset and locks nothing."

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("topic")
        parser.add_argument("--uncommitted", action="store_true", help="also undecided, rolled back and recalled ones")
        parser.add_argument("--since", type=moment, help="stored since then (default: in the last day)")
        self.add_page(parser, "LOG_ID", "the page after this message: earlier ones", int)
        self.add_json(parser)

    def handle(self, *args: Any, **options: Any) -> None:
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
