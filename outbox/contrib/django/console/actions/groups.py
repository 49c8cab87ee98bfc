"""Operator actions on a consumer group: pause, resume, and moving its position on a topic."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, Final

from django.http import QueryDict

from outbox.broker.database.executor import Executor
from outbox.broker.operations import changes
from outbox.broker.operations.changes import QueueReset, reset
from outbox.broker.operations.listings import group_now
from outbox.contrib.django.console.actions.plan import ActionPlan, PageAction
from outbox.contrib.django.console.asking import moment, number, reading, required
from outbox.contrib.django.database.aliases import broker_connection
from outbox.errors import UsageError
from outbox.subscription import Start

# At most this many queues are named in the audit.
_NOTED: Final = 200


def _pause(given: QueryDict) -> ActionPlan:
    group = required(given, "group")
    paused = _is_paused(group)

    def do() -> Mapping[str, Any]:
        with broker_connection() as (connection, schema):
            changes.pause(Executor(connection, schema), group)
        return {"paused": _is_paused(group)}

    return ActionPlan(
        subject=f"group {group}",
        effect=f"Group {group} starts no further handlers; running ones finish. Its messages wait, and its positions "
        "stay.",
        before={"paused": paused},
        nothing=paused,
        do=do,
    )


def _resume(given: QueryDict) -> ActionPlan:
    group = required(given, "group")

    def do() -> Mapping[str, Any]:
        with broker_connection() as (connection, schema):
            released = changes.resume(Executor(connection, schema), group)
        return {"paused": _is_paused(group), "released_queues": released}

    return ActionPlan(
        subject=f"group {group}",
        effect=f"Group {group} continues at its positions, also on queues that an on_error policy stopped.",
        before={"paused": _is_paused(group)},
        do=do,
    )


def _rewind(given: QueryDict) -> ActionPlan:
    group, topic = required(given, "group"), required(given, "topic")
    target, words = _target(given)
    queue, again = number(given, "queue"), given.get("reprocess") == "yes"

    def moved(*, dry_run: bool) -> Sequence[QueueReset]:
        with broker_connection() as (connection, schema):
            run = Executor(connection, schema)
            return reset(run, group, topic, target, number=queue, reprocess=again, dry_run=dry_run)

    planned = moved(dry_run=True)
    back = sum(max(0, one.from_offset - one.to_offset) for one in planned)
    over = sum(max(0, one.to_offset - one.from_offset) for one in planned)
    inbox = (
        "and handles again the messages that its inbox has"
        if again
        else ("and its inbox skips the messages that it has handled")
    )
    return ActionPlan(
        subject=f"group {group} on topic {topic}",
        effect=f"Move group {group} on topic {topic} {words}: {len(planned)} queues move. It gets {back} messages "
        f"again, {inbox}; it never gets {over} messages that it has not handled.",
        caution="If the handler uses no inbox, calls that are running now may take effect a second time.",
        before=_places(planned, "from_offset"),
        nothing=not planned,
        do=lambda: _places(moved(dry_run=False), "to_offset"),
    )


def _target(given: QueryDict) -> tuple[Start | datetime | int, str]:
    to = required(given, "to")
    if to == "earliest":
        return Start.EARLIEST, "to the oldest message in the broker"
    if to == "latest":
        return Start.LATEST, "behind the newest message"
    if to == "time" and (at := moment(given, "time")) is not None:
        return at, f"to the first message queued since {at.isoformat()}"
    if to == "offset" and (offset := number(given, "offset")) is not None:
        return offset, f"to offset {offset}"
    raise UsageError("Give a target: the earliest, the latest, a time, or an offset.")


def _places(moves: Sequence[QueueReset], name: str) -> Mapping[str, Any]:
    shown = {f"{one.topic}/{one.number}": getattr(one, name) for one in moves[:_NOTED]}
    return shown | ({"not_listed": len(moves) - _NOTED} if len(moves) > _NOTED else {})


def _is_paused(group: str) -> bool:
    with reading() as run:
        return group_now(run, group).paused


ACTIONS = (
    PageAction("pause", "Pause a group", _pause),
    PageAction("resume", "Resume a group", _resume),
    PageAction("rewind", "Move a group on a topic", _rewind),
)
