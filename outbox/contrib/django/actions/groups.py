"""Actions on consumer groups and topics. OUTBOX['TOPICS'] creates and changes topics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import datetime
from typing import Any, Final

from outbox.broker.database.executor import Executor, Row
from outbox.broker.log.topics import list_topics
from outbox.broker.operations import changes
from outbox.broker.operations.broker_conditions import outages, retried_errors
from outbox.broker.operations.changes import QueueReset, reset, skip
from outbox.broker.operations.deletion import Loss, delete_group, delete_topic
from outbox.broker.operations.listings import group_now
from outbox.broker.operations.progress import QueueProgress, list_queues
from outbox.contrib.django.actions.cells import error, retried_topic
from outbox.contrib.django.actions.declaration import (
    ActionPlan,
    Button,
    Field,
    FieldKind,
    GroupSection,
    Values,
    action,
    argument,
    counted,
)
from outbox.contrib.django.actions.listing import Asked, Column, Listing
from outbox.contrib.django.database.aliases import on_broker
from outbox.errors import UsageError
from outbox.subscription import Start

GROUP: Final = argument("group", "consumer group")
TOPIC: Final = argument("topic", "topic")
# The audit names at most this many queues.
_NOTED: Final = 200


def _described(losses: Sequence[Loss]) -> str:
    """A text with the numbers of messages that a deletion removes."""
    lag, retrying, dead = (sum(getattr(one, name) for one in losses) for name in ("lag", "retrying", "dead"))
    return f"{counted(lag, 'message')} not consumed, {retrying} that are retried, {counted(dead, 'dead letter')}"


def _is_halted(row: Any) -> bool:
    return bool(row.paused or row.stopped)


@action(
    "pause",
    "Pause a group",
    "outbox_group pause",
    GROUP,
    buttons={"groups": lambda row: [] if _is_halted(row) else [Button("Pause …", fields={"group": row.name})]},
)
def _pause(values: Values) -> ActionPlan:
    group = values["group"]
    paused = _is_paused(group)

    def do() -> Mapping[str, Any]:
        on_broker(changes.pause, group)
        return {"paused": _is_paused(group)}

    return ActionPlan(
        subject=f"group {group}",
        effect=f"Group {group} starts no further handlers. Running handlers finish. The messages of the group "
        "wait, and its positions do not change.",
        before={"paused": paused},
        nothing=paused,
        do=do,
    )


@action(
    "resume",
    "Resume a group, stopped queues too",
    "outbox_group resume",
    GROUP,
    buttons={"groups": lambda row: [Button("Resume …", "good", {"group": row.name})] if _is_halted(row) else []},
)
def _resume(values: Values) -> ActionPlan:
    group = values["group"]

    def do() -> Mapping[str, Any]:
        released = on_broker(changes.resume, group)
        return {"paused": _is_paused(group), "released_queues": released}

    return ActionPlan(
        subject=f"group {group}",
        effect=f"Group {group} continues at its positions, also on queues that an on_error policy stopped.",
        before={"paused": _is_paused(group)},
        do=do,
    )


def _is_paused(group: str) -> bool:
    return bool(on_broker(group_now, group).paused)


# -- skip -----------------------------------------------------------------------------------------------


def _skip_button(queue: QueueProgress) -> Sequence[Button]:
    fields = {"group": queue.group, "topic": queue.topic, "id": queue.blocked_by}
    return [Button("Skip this message …", "bad", fields)] if queue.blocked_by else []


@action(
    "skip",
    "Skip the message that blocks a queue",
    "outbox_group skip",
    GROUP,
    TOPIC,
    argument("id", "message id", FieldKind.ID),
    buttons={"queue": _skip_button},
)
def _skip(values: Values) -> ActionPlan:
    group, topic, message_id = values["group"], values["topic"], values["id"]

    planned = on_broker(skip, group, topic, message_id, dry_run=True)
    return ActionPlan(
        subject=f"group {group} on topic {topic}",
        effect=f"Group {group} skips message {message_id} of topic {topic}, queue {planned.number}, and continues with "
        "the next message of this queue.",
        caution="The group never handles the skipped message, unless you reset the group. If a handler of the message "
        "is running now, it may still take effect.",
        dangerous=True,
        before=_offsets([planned], "from_offset"),
        do=lambda: _offsets([on_broker(skip, group, topic, message_id)], "to_offset"),
    )


# -- reset ----------------------------------------------------------------------------------------------


_TARGET: Final = "Where the group continues"


def _reset_section(run: Executor, group: str, topic: str) -> tuple[object, Mapping[str, str]] | None:
    # A broadcast group has no positions that the broker stores.
    return None if group_now(run, group).broadcast else ("", {})


@action(
    "reset",
    "Reset the offsets of a group on a topic",
    "outbox_group reset",
    GROUP,
    TOPIC,
    Field("to_time", "ISO 8601 with a time zone", FieldKind.TIME, one_of=_TARGET),
    Field("to_offset", "continue at this offset in every queue", FieldKind.NUMBER, one_of=_TARGET),
    Field("to_latest", "skip all messages that are stored now", FieldKind.FLAG, one_of=_TARGET),
    Field("to_earliest", "continue at the oldest message that the broker still has", FieldKind.FLAG, one_of=_TARGET),
    Field(
        "reprocess",
        "also handle messages that are already in the inbox",
        FieldKind.FLAG,
        label="Handle messages in the inbox again",
    ),
    section=GroupSection("Reset the group", "Reset …", _reset_section),
)
def _reset(values: Values) -> ActionPlan:
    group, topic, again = values["group"], values["topic"], values["reprocess"]
    target, words = _target(values)

    def moved(*, dry_run: bool) -> Sequence[QueueReset]:
        return on_broker(reset, group, topic, target, reprocess=again, dry_run=dry_run)

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


# -- delete ----------------------------------------------------------------------------------------------


@action(
    "delete_group",
    "Delete a group that no longer runs, or only its subscription to one topic",
    "outbox_group delete",
    GROUP,
    Field("topic", "delete only the group's subscription to this topic"),
    permission=None,
)
def _delete(values: Values) -> ActionPlan:
    group, topic = values["group"], values["topic"]

    losses = on_broker(delete_group, group, topic=topic, dry_run=True)
    what = f"group {group}" if topic is None else f"the subscription of group {group} to {topic}"
    return ActionPlan(
        subject=what,
        effect=f"Delete {what}, with {_described(losses)}.",
        caution="This cannot be undone.",
        dangerous=True,
        before={"losses": [asdict(one) for one in losses]},
        do=lambda: {"lost": [asdict(one) for one in on_broker(delete_group, group, topic=topic)]},
    )


# -- the list -------------------------------------------------------------------------------------------


def _read_queues(run: Executor, asked: Asked) -> list[Row]:
    group = asked["group"]
    group_now(run, group)
    paused = {one["topic"]: f"outage: {one['error']}" for one in outages(run) if one["group"] == group}
    # The most frequent error of a topic comes last, so it stays.
    retried = {
        one["topic"]: f"failing {counted(one['messages'], 'message')}: {one['error']}"
        for one in reversed(retried_errors(run))
        if one["group"] == group
    }
    return [
        Row(
            **asdict(one),
            outage=paused.get(retried_topic(one.topic)) if one.lag else None,
            retries=retried.get(retried_topic(one.topic)) if one.is_retry else None,
        )
        for one in list_queues(run, group)
    ]


QUEUES: Final = Listing(
    "queues",
    (
        Column("topic", "topic"),
        Column("queue", "number"),
        Column("offset", "next_offset"),
        Column("end", "head"),
        *(Column(one.replace("_", " "), one) for one in ("lag", "handled", "skipped", "filtered", "sent_back", "dead")),
        Column("expired", "expired"),
        Column("owner", "owner"),
        Column("held up by", lambda one: error(one.stopped or one.blocked_error or one.outage or one.retries)),
    ),
    _read_queues,
    command="outbox_group offsets",
    help="show each queue of a group: position, end, owner, and the error that holds it up",
    fields=(GROUP,),
)


# -- topics ---------------------------------------------------------------------------------------------


@action(
    "delete_topic",
    "Delete a topic: refuse new messages, delete its subscriptions and messages",
    "outbox_topic delete",
    argument("name", "topic"),
    permission=None,
)
def _delete_topic(values: Values) -> ActionPlan:
    name = values["name"]
    loss = on_broker(delete_topic, name, dry_run=True)
    return ActionPlan(
        subject=f"topic {name}",
        effect=f"Delete topic {name}, with {counted(loss.undelivered, 'message')} in no queue yet, and "
        f"{_described(loss.groups)}. Remove the topic from OUTBOX['TOPICS'], or `migrate` declares it again.",
        caution="This cannot be undone.",
        dangerous=True,
        before={"losses": asdict(loss)},
        do=lambda: {"lost": asdict(on_broker(delete_topic, name))},
    )


DECLARED_TOPICS: Final = Listing(
    "declared_topics",
    (
        Column("topic", "name"),
        Column("types", lambda one: "+".join(sorted(one.types))),
        Column("queues", "queue_count"),
        Column("retention s", "retention_seconds"),
        Column("key lock", "key_lock"),
        Column("on park", "on_park"),
    ),
    lambda run, asked: list_topics(run),
    command="outbox_topic list",
    help="list every topic of the broker",
    json=lambda one: {**asdict(one), "types": sorted(one.types)},
)
