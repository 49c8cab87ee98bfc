"""`manage.py outbox_dead_letter list|show|replay|discard`."""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any
from uuid import UUID

from django.core.management.base import CommandError, CommandParser

from outbox.broker.database.executor import Executor
from outbox.broker.groups.registration import group_id_of
from outbox.broker.operations.dead_letters import LetterSelection, PagePosition, failed_attempts, list_dead_letters
from outbox.contrib.django.database.aliases import broker_connection
from outbox.contrib.django.management.output import OutboxCommand, first_line, moment, positive
from outbox.contrib.django.operations.commands import discard_dead_letters, replay_dead_letters


class Command(OutboxCommand):
    """Parses, then calls one function."""

    help = "List the dead letters of consumer groups, replay them, or discard them."

    def add_arguments(self, parser: CommandParser) -> None:
        actions = parser.add_subparsers(dest="action", required=True)
        shown = actions.add_parser("list", help="unsettled dead letters; --json with the error of every attempt")
        shown.add_argument("group", nargs="?")
        _add_selection(shown)
        self.add_page(shown, "PLACE", "the page after this position", _place)
        shown.add_argument("--replayed", dest="settled", action="store_true", help="also replayed and discarded ones")
        self.add_json(shown)
        one = actions.add_parser("show", help="one dead letter, settled or not, with the whole error of every attempt")
        one.add_argument("group")
        one.add_argument("id", type=UUID, help="message id")
        self.add_json(one)
        again = actions.add_parser("replay", help="deliver again; attempts count from 1")
        self.add_dry_run(again, "list what would be replayed, change nothing")
        gone = actions.add_parser("discard", help="never deliver; retention removes them with their messages")
        self.add_no_input(gone)
        for settling in (again, gone):
            settling.add_argument("group")
            settling.add_argument("ids", nargs="*", type=UUID, help="message ids")
            _add_selection(settling)
            settling.add_argument("--all", action="store_true", help="all dead letters of the group")
            settling.add_argument("--limit", type=positive, default=10_000, help="at most so many, oldest first")
            self.add_json(settling)

    def handle(self, *args: Any, **options: Any) -> None:
        getattr(self, f"_{options['action']}")(options)

    def _replay(self, options: dict[str, Any]) -> None:
        chosen, limit = _chosen(options), options["limit"]
        count = replay_dead_letters(options["group"], chosen, limit=limit, dry_run=options["dry_run"])
        self._report(count, "delivered again", options)

    def _discard(self, options: dict[str, Any]) -> None:
        selection = _chosen(options)
        group, limit = options["group"], options["limit"]
        count = discard_dead_letters(group, selection, limit=limit, dry_run=True)
        if count and not options["dry_run"]:
            self.confirm(f"{count} dead letters of group {group} will be discarded.", options)
            count = discard_dead_letters(group, selection, limit=limit, dry_run=False)
        self._report(count, "discarded", options)

    def _report(self, count: int, what: str, options: dict[str, Any]) -> None:
        if options["json"]:
            self.print_json({"count": count, "dry_run": options["dry_run"]})
            return
        self.say(f"{count} dead letters {'would be' if options['dry_run'] else 'are'} {what}.")
        self.say_more(count, options["limit"])

    def _list(self, options: dict[str, Any]) -> None:
        with broker_connection() as (connection, schema):
            run = Executor(connection, schema)
            if options["group"]:
                group_id_of(run, options["group"])
            page = {name: options[name] for name in ("settled", "after", "limit")}
            letters = list_dead_letters(run, options["group"], _selection(options), **page)
            if options["json"]:
                self.print_json(
                    [
                        {"letter": item, "failures": failed_attempts(run, item.group, item.message_id)}
                        for item in letters
                    ]
                )
                return
        self.print_rows(
            ["group", "message", "topic", "key", "attempts", "dead since", "error"],
            ((d.group, d.message_id, d.topic, d.key, d.attempts, d.dead_at, first_line(d.error)) for d in letters),
        )
        self.say_more(len(letters), options["limit"], letters and letters[-1].place)

    def _show(self, options: dict[str, Any]) -> None:
        group, message_id = options["group"], options["id"]
        with broker_connection() as (connection, schema):
            run = Executor(connection, schema)
            group_id_of(run, group)
            letters = list_dead_letters(run, group, LetterSelection(message_ids=[message_id]), settled=True)
            failures = failed_attempts(run, group, message_id)
        if not letters:
            raise CommandError(
                f"group {group!r} has no dead letter {message_id}: `outbox_trace {message_id}` shows where the "
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


def _place(text: str) -> PagePosition:
    moment_text, _, log_id = text.partition("/")
    if not log_id.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a position: use the one at the end of a page")
    return PagePosition(moment(moment_text), int(log_id))


def _add_selection(parser: CommandParser) -> None:
    parser.add_argument("--error", help="those whose last error contains this text")
    parser.add_argument("--error-type", help="those whose last error is of this type (its name, without modules)")
    parser.add_argument("--topic", help="those published to this topic")
    parser.add_argument("--key", help="those with this key")
    parser.add_argument("--since", type=moment, help="dead-lettered at this time or later; ISO 8601 with a time zone")
    parser.add_argument("--until", type=moment, help="dead-lettered before this time")


def _selection(options: dict[str, Any]) -> LetterSelection:
    fields = ("error", "error_type", "topic", "key", "since", "until")
    return LetterSelection(message_ids=options.get("ids") or None, **{name: options[name] for name in fields})


def _chosen(options: dict[str, Any]) -> LetterSelection:
    """The dead letters of an action. Settling all of them needs --all: leaving an option out is refused."""
    selection = _selection(options)
    if selection.is_all != options["all"]:
        raise CommandError("name message ids, select by --error, --key …, or pass --all.")
    return selection
