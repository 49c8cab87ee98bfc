"""`manage.py outbox_transaction list|describe|abort`."""

from __future__ import annotations

from typing import Any
from uuid import UUID

from django.core.management.base import CommandError, CommandParser

from outbox.broker.database.executor import Executor
from outbox.broker.operations.listings import OpenTransaction, describe, list_open
from outbox.contrib.django.database.aliases import broker_connection
from outbox.contrib.django.management.output import OutboxCommand, first_line
from outbox.contrib.django.operations.commands import decide, rehearse
from outbox.transaction import Decision


class Command(OutboxCommand):
    """Parses, then calls one function."""

    help = (
        "List the open transactions of the broker, describe one, or abort it. outbox_ask ID has one checked now, "
        "outbox_decide ID settles it."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        actions = parser.add_subparsers(dest="action", required=True)
        shown = actions.add_parser("list", help="oldest first, including new ones that are not checked yet")
        shown.add_argument("--group", help="only of this producer group")
        shown.add_argument("--transactional-id", metavar="ID", help="only those of the fenced producer with this id")
        shown.add_argument("--parked", action="store_true", help="only parked ones")
        self.add_page(shown, "ID", "the page after this transaction", UUID)
        described = actions.add_parser("describe", help="one with its messages and the answers of its checks")
        ended = actions.add_parser("abort", help="roll back one that has not committed and is not running")
        for one in (described, ended):
            one.add_argument("id", type=UUID, help="transaction id")
        self.add_dry_run(ended, "show what the ledger says, abort nothing")
        for one in (shown, described, ended):
            self.add_json(one)

    def handle(self, *args: Any, **options: Any) -> None:
        {"list": self._list, "describe": self._describe, "abort": self._abort}[options["action"]](options)

    def _list(self, options: dict[str, Any]) -> None:
        with broker_connection() as (connection, schema):
            narrowed = {name: options[name] for name in ("group", "transactional_id", "parked", "after", "limit")}
            found = list_open(Executor(connection, schema), **narrowed)
        if options["json"]:
            self.print_json(found)
            return
        header = ["transaction", "producer group", "producer", "messages", "topics", "stored", "state", "last answer"]
        self.print_rows(header, map(_row, found))
        self.say_more(len(found), options["limit"], found[-1].transaction_id if found else None)

    def _describe(self, options: dict[str, Any]) -> None:
        with broker_connection() as (connection, schema):
            found = describe(Executor(connection, schema), options["id"])
        if found is None:
            raise CommandError(
                f"{options['id']} is not an open transaction: `outbox_trace {options['id']}` shows its outcome."
            )
        if options["json"]:
            self.print_json(found)
            return
        one = found.transaction
        self.say(f"{one.transaction_id} of {one.producer_group}: {one.state}, stored {one.stored_at}")
        self.say(
            f"producer: {_producer(one) or 'without a transactional id'}; checks: {one.checks}, next: {one.due_at}"
        )
        self.print_rows(
            ["message", "topic", "key"], ((item.message_id, item.topic, item.key) for item in found.messages)
        )
        for answer in found.answers:
            self.say(f"{answer.checked_at}: {answer.answer}, {answer.detail}")

    def _abort(self, options: dict[str, Any]) -> None:
        act = rehearse if options["dry_run"] else decide
        outcome = str(act(options["id"], Decision.ROLLBACK))
        if options["json"]:
            self.print_json({"transaction_id": options["id"], "outcome": outcome, "dry_run": options["dry_run"]})
        elif options["dry_run"]:
            self.say(f"ROLLBACK of {options['id']}: nothing was decided (--dry-run); {outcome}.")
        else:
            self.say(f"ROLLBACK of {options['id']}: {outcome}.")


def _row(one: OpenTransaction) -> tuple[object, ...]:
    return (
        one.transaction_id,
        one.producer_group,
        _producer(one),
        one.messages,
        ", ".join(one.topics),
        one.stored_at,
        one.state,
        first_line(one.last_answer),
    )


def _producer(one: OpenTransaction) -> str:
    if one.transactional_id is None:
        return ""
    return f"{one.transactional_id}, epoch {one.epoch}{' (fenced)' if one.fenced else ''}"
