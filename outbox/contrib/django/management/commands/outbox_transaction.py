"""`manage.py outbox_transaction list|describe|check|ask|decide|abort|reject|accept`."""

from __future__ import annotations

import dataclasses
from typing import Any
from uuid import UUID

from django.core.management.base import CommandError, CommandParser

from outbox.broker.database.executor import Executor
from outbox.broker.operations.listings import OpenTransaction, describe, list_open
from outbox.contrib.django.database.aliases import broker_connection
from outbox.contrib.django.engine.operator_table import is_on_rocketmq
from outbox.contrib.django.management.acting import ActionCommand
from outbox.contrib.django.management.output import first_line
from outbox.contrib.django.publishing.checkback import run_check_back


class Command(ActionCommand):
    """Parses the arguments, then calls the function of the chosen subcommand."""

    help = "List and settle the open transactions of the broker, or refuse new transactions of a producer group."

    def add_arguments(self, parser: CommandParser) -> None:
        subcommands = self.add_subcommands(parser)
        shown = subcommands.add_parser(
            "list", help="list open transactions, oldest first, including new transactions that are not checked yet"
        )
        shown.add_argument("--group", help="list only transactions of this producer group")
        shown.add_argument(
            "--transactional-id", metavar="ID", help="list only transactions of the producer with this transactional id"
        )
        shown.add_argument("--parked", action="store_true", help="list only parked transactions")
        self.add_page(shown, "ID", "list the transactions after this transaction", UUID)
        described = subcommands.add_parser(
            "describe", help="show one transaction with its messages and the answers of its checks"
        )
        described.add_argument("id", type=UUID, help="transaction id")
        check = subcommands.add_parser(
            "check", help="run one pass of check-back, as a worker does: answer the due checks of this producer group"
        )
        check.add_argument(
            "--parked", action="store_true", help="also check parked transactions, even if they are not due yet"
        )
        for one in (shown, described, check):
            self.add_json(one)

    def _list(self, options: dict[str, Any]) -> None:
        if is_on_rocketmq():
            self._list_of_server(options)
            return
        with broker_connection() as (connection, schema):
            narrowed = {name: options[name] for name in ("group", "transactional_id", "parked", "after", "limit")}
            found = list_open(Executor(connection, schema), **narrowed)
        if options["json"]:
            self.print_json(found)
            return
        header = ["transaction", "producer group", "producer", "messages", "topics", "stored", "state", "last answer"]
        self.print_rows(header, map(_row, found))
        self.say_more(len(found), options["limit"], found[-1].transaction_id if found else None)

    def _list_of_server(self, options: dict[str, Any], only: UUID | None = None) -> None:
        from outbox.contrib.django.operations.rocketmq import open_transactions

        if options.get("transactional_id") or options.get("parked") or options.get("after"):
            raise CommandError(
                "RocketMQ has no transactional ids and no parked transactions, and the list has one page: leave these "
                "options out."
            )
        found = [one.as_json() for one in open_transactions(options.get("group"))]
        shown = [one for one in found if only is None or one["transaction_id"] == str(only)][: options.get("limit")]
        if only is not None and not shown:
            raise CommandError(f"{only} is not an open transaction: `outbox_message show ID` shows a message's path.")
        if options["json"]:
            self.print_json(shown)
            return
        self.print_rows(list(shown[0]) if shown else [], (tuple(one.values()) for one in shown))

    def _describe(self, options: dict[str, Any]) -> None:
        if is_on_rocketmq():
            self._list_of_server(options, options["id"])
            return
        with broker_connection() as (connection, schema):
            found = describe(Executor(connection, schema), options["id"])
        if found is None:
            raise CommandError(
                f"{options['id']} is not an open transaction: `outbox_message show {options['id']}` shows its outcome."
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

    def _check(self, options: dict[str, Any]) -> None:
        counts = dataclasses.asdict(run_check_back(parked=options["parked"]))
        if options["json"]:
            self.print_json(counts)
        else:
            self.say(", ".join(f"{number} {name.replace('_', ' ')}" for name, number in counts.items()))


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
