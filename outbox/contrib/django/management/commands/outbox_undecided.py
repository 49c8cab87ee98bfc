"""`manage.py outbox_undecided`: transactions that wait for their outcome."""

from __future__ import annotations

from typing import Any
from uuid import UUID

from django.core.management.base import CommandParser

from outbox.broker.database.executor import Executor
from outbox.broker.operations.search import list_undecided
from outbox.contrib.django.database.aliases import broker_connection
from outbox.contrib.django.management.output import OutboxCommand, first_line


class Command(OutboxCommand):
    """Parses, then calls list_undecided."""

    help = (
        "List undecided transactions, the oldest first. outbox_trace ID shows one, outbox_ask ID has it asked about "
        "now, outbox_decide ID settles it."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("group", nargs="?", help="only of this producer group")
        parser.add_argument("--parked", action="store_true", help="only those that check-back gave up")
        self.add_page(parser, "ID", "the page after this transaction", UUID)
        self.add_json(parser)

    def handle(self, *args: Any, **options: Any) -> None:
        with broker_connection() as (connection, schema):
            found = list_undecided(
                Executor(connection, schema),
                options["group"],
                parked=options["parked"],
                after=options["after"],
                limit=options["limit"],
            )
        if options["json"]:
            self.print_json(found)
            return
        self.print_rows(
            ["transaction", "producer group", "topic", "key", "stored", "checks", "parked", "last answer"],
            (
                (
                    one.transaction_id,
                    one.producer_group,
                    one.topic,
                    one.key,
                    one.stored_at,
                    one.checks,
                    one.parked_at,
                    first_line(one.last_answer),
                )
                for one in found
            ),
        )
        self.say_more(len(found), options["limit"], found and found[-1].transaction_id)
