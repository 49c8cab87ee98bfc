"""`manage.py outbox_group list|offsets|pause|resume|reset|rename|delete`."""

from __future__ import annotations

import dataclasses
from argparse import ArgumentTypeError
from collections.abc import Sequence
from datetime import datetime
from functools import partial
from typing import Any, Final

from django.core.management.base import CommandParser

from outbox.broker.database.executor import Executor
from outbox.broker.groups.registration import group_id_of
from outbox.broker.operations.changes import QueueReset, reset
from outbox.broker.operations.deletion import delete_group
from outbox.broker.operations.progress import list_queues
from outbox.contrib.django.database.aliases import broker_connection
from outbox.contrib.django.management.output import OutboxCommand, first_line, moment
from outbox.contrib.django.operations.commands import describe_losses, group_lags, switch_group
from outbox.contrib.django.operations.renaming import rename_group
from outbox.subscription import Start

_COUNTERS: Final = ("handled", "skipped", "filtered", "sent_back", "dead", "expired")


class Command(OutboxCommand):
    """Parses, then calls one function."""

    help = "List, pause, resume, reset, rename or delete consumer groups."

    def add_arguments(self, parser: CommandParser) -> None:
        actions = parser.add_subparsers(dest="action", required=True)
        self.add_json(actions.add_parser("list", help="every group with its lag"))
        offsets = actions.add_parser("offsets", help="every queue of a group: position, end, owner, what blocks it")
        offsets.add_argument("group")
        self.add_json(offsets)
        for action, what in (
            ("pause", "stop delivering messages to a group"),
            ("resume", "continue a group, stopped queues too"),
        ):
            switch = actions.add_parser(action, help=what)
            switch.add_argument("group")
            self.add_dry_run(switch)
            self.add_json(switch)
        move = actions.add_parser("reset", help="move a group's position on a topic")
        move.add_argument("group")
        move.add_argument("topic")
        target = move.add_mutually_exclusive_group(required=True)
        target.add_argument("--to-time", type=moment, help="ISO 8601 with a time zone")
        target.add_argument("--to-offset", type=_offset, help="the number of the next message, in every queue")
        target.add_argument("--to-latest", action="store_true", help="skip all messages")
        target.add_argument("--to-earliest", action="store_true", help="from the oldest message the broker still has")
        move.add_argument("--queue", type=int, help="only the queue of this number")
        move.add_argument("--reprocess", action="store_true", help="also handle messages that the inbox already has")
        self.add_no_input(move, "show what would move, change nothing")
        self.add_json(move)
        name = actions.add_parser("rename", help="rename a group whose consumers are stopped, with everything it has")
        name.add_argument("group")
        name.add_argument("new_name")
        self.add_dry_run(name)
        self.add_json(name)
        gone = actions.add_parser("delete", help="delete a group that no longer runs, or one of its topics")
        gone.add_argument("group")
        gone.add_argument("--topic", help="only its subscription to this topic")
        self.add_no_input(gone)
        self.add_json(gone)

    def handle(self, *args: Any, **options: Any) -> None:
        getattr(self, f"_{options['action']}")(options)

    def _list(self, options: dict[str, Any]) -> None:
        with broker_connection() as (connection, schema):
            rows = group_lags(connection, schema)
        if options["json"]:
            self.print_json(rows)
        else:
            self.print_rows(
                ["group", "queues", "lag", "stopped", "blocked"], (dataclasses.astuple(row) for row in rows)
            )

    def _offsets(self, options: dict[str, Any]) -> None:
        with broker_connection() as (connection, schema):
            group_id_of(Executor(connection, schema), options["group"])
            queues = list_queues(Executor(connection, schema), options["group"])
        if options["json"]:
            self.print_json([{**dataclasses.asdict(queue), "lag": queue.lag} for queue in queues])
            return
        self.print_rows(
            ["topic", "queue", "offset", "end", "lag", *_COUNTERS, "owner", "stopped or blocked by"],
            (
                (
                    *(q.topic, q.number, q.next_offset, q.head, q.lag),
                    *(getattr(q, name) for name in _COUNTERS),
                    *(q.owner, first_line(q.stopped or q.blocked_error)),
                )
                for q in queues
            ),
        )

    def _pause(self, options: dict[str, Any]) -> None:
        self._switched(options, "is paused; running handlers finish.", paused=True)

    def _resume(self, options: dict[str, Any]) -> None:
        self._switched(options, "continues; {} stopped queues were released.", paused=False)

    def _switched(self, options: dict[str, Any], said: str, *, paused: bool) -> None:
        group, dry_run = options["group"], options["dry_run"]
        released = switch_group(group, paused=paused, dry_run=dry_run)
        if options["json"]:
            self.print_json({"group": group, "paused": paused, "released_queues": released, "dry_run": dry_run})
        else:
            self.say(f"{group} {said.format(released)}{' Nothing was changed: --dry-run.' if dry_run else ''}")

    def _reset(self, options: dict[str, Any]) -> None:
        with broker_connection() as (connection, schema):
            move = partial(
                reset,
                Executor(connection, schema),
                options["group"],
                options["topic"],
                _target(options),
                number=options["queue"],
                reprocess=options["reprocess"],
            )
            moves = move(dry_run=True)
            if not options["dry_run"]:
                if harm := _harm(moves, options):
                    self.confirm(harm, options)
                moves = move(dry_run=False)
        if options["json"]:
            self.print_json(moves)
        elif not moves:
            self.say(f"nothing to move: {options['group']} is already there, or the topic has no such queue.")
        else:
            self.print_rows(
                ["topic", "queue", "from", "to"], ((m.topic, m.number, m.from_offset, m.to_offset) for m in moves)
            )
            if options["dry_run"]:
                self.say("nothing was moved (--dry-run)")

    def _rename(self, options: dict[str, Any]) -> None:
        old, new, dry_run = options["group"], options["new_name"], options["dry_run"]
        done = rename_group(old, new, dry_run=dry_run)
        if options["json"]:
            self.print_json({**dataclasses.asdict(done), "dry_run": dry_run})
        elif done.renamed:
            self.say(
                f"{old} is {new} now; {sum(done.copied.values())} rows of its inbox were copied. Start its workers "
                f"with the new name."
            )
        elif dry_run:
            self.say(f"{old} can be renamed to {new}. Nothing was changed: --dry-run.")
        else:
            self.say(f"{old} was renamed to {new} before; nothing is left to do.")

    def _delete(self, options: dict[str, Any]) -> None:
        group, topic = options["group"], options["topic"]
        with broker_connection() as (connection, schema):
            run = Executor(connection, schema)
            losses = delete_group(run, group, topic=topic, dry_run=True)
            if not options["dry_run"]:
                what = f"group {group}" if topic is None else f"the subscription of group {group} to {topic}"
                self.confirm(f"{what} will be deleted, with {describe_losses(losses)}.", options)
                losses = delete_group(run, group, topic=topic)
        if options["json"]:
            self.print_json({"deleted": not options["dry_run"], "losses": losses})
            return
        self.print_rows(
            ["topic", "not consumed", "retrying", "dead"], ((o.topic, o.lag, o.retrying, o.dead) for o in losses)
        )
        self.say("nothing was deleted (--dry-run)" if options["dry_run"] else f"{group} was deleted.")


def _harm(moves: Sequence[QueueReset], options: dict[str, Any]) -> str:
    """What a reset skips or may repeat, for the confirmation; empty if it does neither."""
    named = f"group {options['group']} on topic {options['topic']}"
    skipped = sum(max(0, one.to_offset - one.from_offset) for one in moves)
    parts = [f"{skipped} messages will not be handled by {named}."] if skipped else []
    if options["reprocess"]:
        parts.append(f"{named} will handle again what its inbox shows as handled (--reprocess).")
    return " ".join(parts)


def _target(options: dict[str, Any]) -> Start | datetime | int:
    if options["to_latest"]:
        return Start.LATEST
    if options["to_earliest"]:
        return Start.EARLIEST
    target: datetime | int = options["to_offset"] if options["to_time"] is None else options["to_time"]
    return target


def _offset(text: str) -> int:
    if not text.isdecimal():
        raise ArgumentTypeError(f"{text!r} is not an offset: give a whole number, at least 0.")
    return int(text)
