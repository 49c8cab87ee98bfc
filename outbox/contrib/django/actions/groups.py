"""Actions on consumer groups: pause, resume, skip a message, reset, change limits, rename and delete."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from datetime import datetime
from typing import Any, Final

from outbox.broker.database.executor import Executor
from outbox.broker.operations import changes
from outbox.broker.operations.changes import QueueReset, reset, skip
from outbox.broker.operations.deletion import Loss, delete_group
from outbox.broker.operations.limits import SubscriptionLimits, change_limits, limits_now, planned
from outbox.broker.operations.listings import group_now
from outbox.contrib.django.actions.declaration import (
    ActionField,
    ActionPlan,
    DeclaredAction,
    FieldKind,
    Values,
    counted,
)
from outbox.contrib.django.database.aliases import broker_connection
from outbox.contrib.django.operations.renaming import rename_group
from outbox.errors import UsageError
from outbox.limits import Limits
from outbox.subscription import Start

# The audit names at most this many queues.
_NOTED: Final = 200


def describe_losses(losses: Sequence[Loss]) -> str:
    """A text with the numbers of messages that a deletion removes."""
    lag, retrying, dead = (sum(getattr(one, name) for one in losses) for name in ("lag", "retrying", "dead"))
    return f"{counted(lag, 'message')} not consumed, {retrying} that are retried, {counted(dead, 'dead letter')}"


def _pause(values: Values) -> ActionPlan:
    group = values["group"]
    paused = _is_paused(group)

    def do() -> Mapping[str, Any]:
        with broker_connection() as (connection, schema):
            changes.pause(Executor(connection, schema), group)
        return {"paused": _is_paused(group)}

    return ActionPlan(
        subject=f"group {group}",
        effect=f"Group {group} starts no further handlers. Running handlers finish. The messages of the group "
        "wait, and its positions do not change.",
        before={"paused": paused},
        nothing=paused,
        do=do,
    )


def _resume(values: Values) -> ActionPlan:
    group = values["group"]

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


def _is_paused(group: str) -> bool:
    with broker_connection() as (connection, schema):
        return group_now(Executor(connection, schema), group).paused


# -- skip -----------------------------------------------------------------------------------------------


def _skip(values: Values) -> ActionPlan:
    group, topic, message_id = values["group"], values["topic"], values["id"]

    def moved(*, dry_run: bool) -> QueueReset:
        with broker_connection() as (connection, schema):
            return skip(Executor(connection, schema), group, topic, message_id, dry_run=dry_run)

    planned = moved(dry_run=True)
    return ActionPlan(
        subject=f"group {group} on topic {topic}",
        effect=f"Group {group} skips message {message_id} of topic {topic}, queue {planned.number}, and continues with "
        "the next message of this queue.",
        caution="The group never handles the skipped message, unless you reset the group. If a handler of the message "
        "is running now, it may still take effect.",
        dangerous=True,
        before=_offsets([planned], "from_offset"),
        do=lambda: _offsets([moved(dry_run=False)], "to_offset"),
    )


# -- reset ----------------------------------------------------------------------------------------------


def _reset(values: Values) -> ActionPlan:
    group, topic, again = values["group"], values["topic"], values["reprocess"]
    target, words = _target(values)

    def moved(*, dry_run: bool) -> Sequence[QueueReset]:
        with broker_connection() as (connection, schema):
            run = Executor(connection, schema)
            return reset(run, group, topic, target, number=values["queue"], reprocess=again, dry_run=dry_run)

    planned = moved(dry_run=True)
    back = sum(max(0, one.from_offset - one.to_offset) for one in planned)
    over = sum(max(0, one.to_offset - one.from_offset) for one in planned)
    inbox = "and handles them again even if they are in its inbox" if again else "and skips those that are in its inbox"
    return ActionPlan(
        subject=f"group {group} on topic {topic}",
        effect=f"Move group {group} on topic {topic} {words}, on {counted(len(planned), 'queue')}. The group gets "
        f"{counted(back, 'message')} again, {inbox}. The group skips {counted(over, 'message')} that it has not "
        "handled.",
        caution="If the handler uses no inbox, calls that are running now may take effect a second time.",
        dangerous=over > 0 or again,
        before=_offsets(planned, "from_offset"),
        nothing=not planned,
        do=lambda: _offsets(moved(dry_run=False), "to_offset"),
    )


def _target(values: Values) -> tuple[Start | datetime | int, str]:
    flags = (values["to_earliest"], values["to_latest"])
    if sum(flags) + sum(values[name] is not None for name in ("to_time", "to_offset")) != 1:
        raise UsageError("Give one target: the earliest, the latest, a time, or an offset.")
    if values["to_earliest"]:
        return Start.EARLIEST, "to the oldest message in the broker"
    if values["to_latest"]:
        return Start.LATEST, "to the end, after the newest message"
    if values["to_time"] is not None:
        return values["to_time"], f"to the first message queued at {values['to_time'].isoformat()} or later"
    return values["to_offset"], f"to offset {values['to_offset']}"


def _offsets(moves: Sequence[QueueReset], name: str) -> Mapping[str, Any]:
    shown = {f"{one.topic}/{one.number}": getattr(one, name) for one in moves[:_NOTED]}
    return shown | ({"not_listed": len(moves) - _NOTED} if len(moves) > _NOTED else {})


# -- limits ---------------------------------------------------------------------------------------------


def _change_limits(values: Values) -> ActionPlan:
    group, topic = values["group"], values["topic"]
    fields = {name: values[name] for name in ("running", "per_key", "rate", "burst") if values[name] is not None}
    if bool(fields) == values["from_code"]:
        raise UsageError("Give a limit to change, or return to the limits of the code (--from-code).")
    with broker_connection() as (connection, schema):
        now = limits_now(Executor(connection, schema), group, topic)
    override = None if values["from_code"] else {**(now.override or {}), **fields}
    limits = planned(now, fields) if override is not None else planned(replace(now, override=None), {})

    def do() -> Mapping[str, Any]:
        with broker_connection() as (connection, schema):
            run = Executor(connection, schema)
            change_limits(run, group, topic, override)
            return _limits(limits_now(run, group, topic))

    return ActionPlan(
        subject=f"group {group} on topic {topic}",
        effect=f"Limit group {group} on topic {topic} to {limits}. Workers obey within a second. Running handlers "
        "finish.",
        before=_limits(now),
        nothing=override == now.override,
        do=do,
    )


def present_limits(now: SubscriptionLimits) -> Mapping[str, str]:
    """The limits that hold now as text, by the names of the fields; a limit that does not exist is named too."""
    stored = now.limits.stored()
    return {name: str(stored.get(name, "no limit")) for name in ("running", "per_key", "rate")} | {
        "burst": str(now.limits.burst)
    }


def _present_limits(fixed: Mapping[str, str]) -> Mapping[str, str]:
    with broker_connection() as (connection, schema):
        return present_limits(limits_now(Executor(connection, schema), fixed["group"], fixed["topic"]))


def _limits(now: SubscriptionLimits) -> Mapping[str, Any]:
    return {"limits": str(now.limits), "code": str(Limits(**now.declared)), "changed": dict(now.override or {})}


# -- rename, delete -------------------------------------------------------------------------------------


def _rename(values: Values) -> ActionPlan:
    old, new = values["group"], values["new_name"]
    rename_group(old, new, dry_run=True)

    def do() -> Mapping[str, Any]:
        return asdict(rename_group(old, new))

    return ActionPlan(
        subject=f"group {old}",
        effect=f"Rename group {old} to {new}, with its positions, retries, dead letters and inbox rows. Start its "
        "workers with the new name.",
        before={"name": old},
        do=do,
    )


def _delete(values: Values) -> ActionPlan:
    group, topic = values["group"], values["topic"]

    def deleted(*, dry_run: bool) -> Sequence[Loss]:
        with broker_connection() as (connection, schema):
            return delete_group(Executor(connection, schema), group, topic=topic, dry_run=dry_run)

    losses = deleted(dry_run=True)
    what = f"group {group}" if topic is None else f"the subscription of group {group} to {topic}"
    return ActionPlan(
        subject=what,
        effect=f"Delete {what}, with {describe_losses(losses)}.",
        caution="This cannot be undone.",
        dangerous=True,
        before={"losses": [asdict(one) for one in losses]},
        do=lambda: {"lost": [asdict(one) for one in deleted(dry_run=False)]},
    )


_GROUP = ActionField(name="group", required=True, positional=True, help="consumer group")
_TARGET = "Where the group continues"

ACTIONS: Final = (
    DeclaredAction(name="pause", title="Pause a group", command="outbox_group pause", fields=(_GROUP,), plan=_pause),
    DeclaredAction(
        name="resume",
        title="Resume a group, stopped queues too",
        command="outbox_group resume",
        fields=(_GROUP,),
        plan=_resume,
    ),
    DeclaredAction(
        name="skip",
        title="Skip the message that blocks a queue",
        command="outbox_group skip",
        fields=(
            _GROUP,
            ActionField(name="topic", required=True, positional=True, help="topic"),
            ActionField(name="id", kind=FieldKind.ID, required=True, positional=True, help="message id"),
        ),
        plan=_skip,
    ),
    DeclaredAction(
        name="reset",
        title="Reset the offsets of a group on a topic",
        command="outbox_group reset",
        fields=(
            _GROUP,
            ActionField(name="topic", required=True, positional=True, help="topic"),
            ActionField(name="to_time", kind=FieldKind.TIME, one_of=_TARGET, help="ISO 8601 with a time zone"),
            ActionField(
                name="to_offset",
                kind=FieldKind.NUMBER,
                one_of=_TARGET,
                help="continue at this offset in every queue",
            ),
            ActionField(
                name="to_latest", kind=FieldKind.FLAG, one_of=_TARGET, help="skip all messages that are stored now"
            ),
            ActionField(
                name="to_earliest",
                kind=FieldKind.FLAG,
                one_of=_TARGET,
                help="continue at the oldest message that the broker still has",
            ),
            ActionField(
                name="queue",
                kind=FieldKind.NUMBER,
                label="Queue (empty: all)",
                help="move only the queue with this number",
            ),
            ActionField(
                name="reprocess",
                kind=FieldKind.FLAG,
                label="Handle messages in the inbox again",
                help="also handle messages that are already in the inbox",
            ),
        ),
        plan=_reset,
    ),
    DeclaredAction(
        name="limits",
        title="Change the limits of a group on a topic, or return to the limits of the code",
        command="outbox_group limits",
        fields=(
            _GROUP,
            ActionField(name="topic", required=True, positional=True, help="topic"),
            ActionField(
                name="running",
                kind=FieldKind.COUNT,
                example="10",
                label="Handler calls at the same time",
                help="at most this number of handler calls run at the same time",
            ),
            ActionField(
                name="per_key",
                kind=FieldKind.COUNT,
                example="1",
                label="Handler calls of one key",
                help="at most this number of handler calls of one key run at the same time",
            ),
            ActionField(
                name="rate", label="Messages per time", example="100/min", help='messages per time, such as "100/min"'
            ),
            ActionField(
                name="burst",
                kind=FieldKind.COUNT,
                label="Messages at once",
                example="5",
                help="this number of messages may start at once after a time without messages",
            ),
            ActionField(
                name="from_code",
                kind=FieldKind.FLAG,
                label="Return to the limits of the code",
                help="remove all changes, so that the limits of the code hold again",
            ),
        ),
        plan=_change_limits,
        present=_present_limits,
    ),
    DeclaredAction(
        name="rename_group",
        title="Rename a stopped group, with its positions, retries, dead letters and inbox rows",
        command="outbox_group rename",
        fields=(_GROUP, ActionField(name="new_name", required=True, positional=True, help="the new name")),
        plan=_rename,
        permission=None,
    ),
    DeclaredAction(
        name="delete_group",
        title="Delete a group that no longer runs, or only its subscription to one topic",
        command="outbox_group delete",
        fields=(_GROUP, ActionField(name="topic", help="delete only the group's subscription to this topic")),
        plan=_delete,
        permission=None,
    ),
)
