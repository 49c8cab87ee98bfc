"""`manage.py outbox_dead_letter list|show|replay|discard`."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence
from typing import Any
from uuid import UUID

from django.core.management.base import CommandError, CommandParser

from outbox.broker.database.executor import Executor
from outbox.broker.groups.registration import group_id_of
from outbox.broker.operations.dead_letters import (
    DeadLetter,
    FailedAttempt,
    LetterSelection,
    PagePosition,
    failed_attempts,
    list_dead_letters,
)
from outbox.contrib.django.actions.messages import SELECTION
from outbox.contrib.django.database.aliases import broker_connection
from outbox.contrib.django.engine.operator_table import is_on_rocketmq
from outbox.contrib.django.management.acting import ActionCommand, add_field
from outbox.contrib.django.management.output import first_line, moment


class Command(ActionCommand):
    """Parses the arguments, then calls the function of the chosen subcommand."""

    help = "List the dead letters of consumer groups, replay them, or discard them."

    def add_arguments(self, parser: CommandParser) -> None:
        subcommands = self.add_subcommands(parser)
        shown = subcommands.add_parser(
            "list", help="list unsettled dead letters; with --json, also the error of every attempt"
        )
        shown.add_argument("group", nargs="?")
        for field in SELECTION:
            add_field(shown, field)
        self.add_page(
            shown, "PLACE", "show the page after this position, which the end of the previous page shows", _place
        )
        shown.add_argument(
            "--settled", action="store_true", help="also list dead letters that were replayed or discarded"
        )
        self.add_json(shown)
        one = subcommands.add_parser(
            "show", help="show one dead letter, settled or not, with the whole error of every attempt"
        )
        one.add_argument("group")
        one.add_argument("id", type=UUID, help="message id")
        self.add_json(one)

    def _list(self, options: dict[str, Any]) -> None:
        if is_on_rocketmq():
            self._list_of_server(options)
            return
        with broker_connection() as (connection, schema):
            run = Executor(connection, schema)
            if options["group"]:
                group_id_of(run, options["group"])
            page = {name: options[name] for name in ("settled", "after", "limit")}
            selection = LetterSelection(**{field.name: options[field.name] for field in SELECTION})
            letters = list_dead_letters(run, options["group"], selection, **page)
            if options["json"]:
                self.print_json(
                    [
                        {"letter": item, "failures": failed_attempts(run, item.group, item.message_id)}
                        for item in letters
                    ]
                )
                return
        self._print(letters, options)

    def _list_of_server(self, options: dict[str, Any]) -> None:
        from outbox.contrib.django.operations.rocketmq import list_letters

        page = {name: options[name] for name in ("settled", "after", "limit")}
        selection = LetterSelection(**{field.name: options[field.name] for field in SELECTION})
        letters = list_letters(options["group"], selection, **page)
        if options["json"]:
            # RocketMQ's consumers note the error of the last attempt only.
            self.print_json([{"letter": item, "failures": []} for item in letters])
            return
        self._print(letters, options)

    def _print(self, letters: Sequence[DeadLetter], options: dict[str, Any]) -> None:
        self.print_rows(
            ["group", "message", "topic", "key", "attempts", "dead since", "error"],
            ((d.group, d.message_id, d.topic, d.key, d.attempts, d.dead_at, first_line(d.error)) for d in letters),
        )
        self.say_more(len(letters), options["limit"], letters and letters[-1].place)

    def _show(self, options: dict[str, Any]) -> None:
        group, message_id = options["group"], options["id"]
        letters, failures = self._found(group, message_id)
        if not letters:
            raise CommandError(
                f"group {group!r} has no dead letter {message_id}: `outbox_message show {message_id}` shows where the "
                "message is."
            )
        if options["json"]:
            self.print_json({"letter": letters[0], "failures": failures})
            return
        for name, value in dataclasses.asdict(letters[0]).items():
            self.say(f"{name.replace('_', ' ')}: {'' if value is None else value}")
        for one in failures:
            self.say(f"attempt {one.attempt}, {one.failed_at}:")
            for line in one.error.splitlines():
                self.say(f"    {line}")

    @staticmethod
    def _found(group: str, message_id: UUID) -> tuple[Sequence[DeadLetter], Sequence[FailedAttempt]]:
        only = LetterSelection(message_ids=[message_id])
        if is_on_rocketmq():
            from outbox.contrib.django.operations.rocketmq import list_letters

            return list_letters(group, only, settled=True), []
        with broker_connection() as (connection, schema):
            run = Executor(connection, schema)
            group_id_of(run, group)
            return list_dead_letters(run, group, only, settled=True), failed_attempts(run, group, message_id)


def _place(text: str) -> PagePosition:
    moment_text, _, log_id = text.partition("/")
    if not log_id.isdecimal():
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a position: copy the value after --after from the end of a page"
        )
    return PagePosition(moment(moment_text), int(log_id))
