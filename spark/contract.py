"""The contract of the tables: what the pipeline reads of the broker's published views, and how of the user's tables.

The views belong to the broker (`outbox/broker/schema`), carry their version in their name and are described in
docs/reconciliation.md. A test holds this list against an installed broker.
"""

from __future__ import annotations

from typing import Final

from .rules import FieldType, GroupRule, Rule
from .sources.base import Column, ColumnKind, Selection

# View -> column -> PostgreSQL type.
VIEWS: Final[dict[str, dict[str, str]]] = {
    "message_v1": {
        "log_id": "bigint",
        "message_id": "uuid",
        "transaction_id": "uuid",
        "topic": "text",
        "key": "text",
        "tag": "text",
        "content_type": "text",
        "body": "bytea",
        "stored_at": "timestamp with time zone",
        "deliver_at": "timestamp with time zone",
        "state": "text",
        "decided_by": "text",
        "decided_at": "timestamp with time zone",
    },
    "delivery_v1": {
        "consumer_group": "text",
        "topic": "text",
        "log_id": "bigint",
        "key": "text",
        "tag": "text",
        "state": "text",
        "last_consumed_at": "timestamp with time zone",
    },
    "dead_letter_v1": {
        "consumer_group": "text",
        "topic": "text",
        "key": "text",
        "tag": "text",
        "dead_at": "timestamp with time zone",
        "replayed_at": "timestamp with time zone",
    },
    "topic_v1": {"topic": "text", "retention_seconds": "bigint", "pruned_at": "timestamp with time zone"},
}
MESSAGE_STATES: Final = ("committed", "recalled", "rolled_back", "parked", "undecided")

_TIMESTAMP, _BIGINT = ColumnKind.TIMESTAMP, ColumnKind.BIGINT


def rows(rule: Rule) -> Selection:
    """The business rows that must have produced a message, with the compared columns as f0, f1, …"""
    fields = [
        Column(
            f"f{number}",
            field.column,
            ColumnKind.MICROSECONDS if field.type is FieldType.TIMESTAMP else ColumnKind.TEXT,
            field.type,
        )
        for number, field in enumerate(rule.fields)
    ]
    return Selection(
        table=rule.table,
        columns=(Column("key", rule.key), Column("at", rule.time, _TIMESTAMP, FieldType.TIMESTAMP), *fields),
        key=rule.key,
        time=rule.time,
        conditions=(rule.when,) if rule.when else (),
    )


def messages(rule: Rule, *, detailed: bool = False) -> Selection:
    """The messages of the rule's topic (and tag); `detailed` adds what only a finding shows."""
    columns = [
        Column("key", "key"),
        Column("at", "stored_at", _TIMESTAMP),
        Column("log_id", "log_id", _BIGINT),
        Column("decided_at", "decided_at", _TIMESTAMP),
        Column("deliver_at", "deliver_at", _TIMESTAMP),
        Column("state", "state"),
        Column("content_type", "content_type"),
        Column("body", "body", ColumnKind.BINARY),
    ]
    if detailed:
        columns += [Column(name, name) for name in ("message_id", "transaction_id", "tag", "decided_by")]
    elif any(group.message_id for group in rule.groups):
        columns.append(Column("message_id", "message_id"))
    return Selection(
        table="message_v1",
        columns=tuple(columns),
        key="key",
        time="stored_at",
        equals=_topic(rule),
        span="log_id",
        in_broker=True,
    )


def effects(rule: Rule, group: GroupRule) -> Selection:
    """The rows in which a group's work shows; without an effect table, the deliveries the broker says are done."""
    if group.table is None:
        return Selection(
            table="delivery_v1",
            columns=(Column("key", "key"), Column("at", "last_consumed_at", _TIMESTAMP)),
            key="key",
            time="stored_at",
            equals=(*_topic(rule), ("consumer_group", group.name), ("state", "passed")),
            span="log_id",
            in_broker=True,
        )
    key = group.key or group.message_id or ""
    return Selection(
        table=group.table,
        columns=(
            Column("key" if group.key else "message_id", key),
            Column("at", group.time or "", _TIMESTAMP, FieldType.TIMESTAMP),
        ),
        key=key,
        time=group.time,
        conditions=(group.when,) if group.when else (),
    )


def dead_letters(rule: Rule) -> Selection:
    """Dead letters of the topic that were not replayed."""
    return Selection(
        table="dead_letter_v1",
        columns=(Column("key", "key"), Column("at", "dead_at", _TIMESTAMP), Column("consumer_group", "consumer_group")),
        key="key",
        conditions=("replayed_at IS NULL",),
        equals=_topic(rule),
        in_broker=True,
    )


def deliveries(rule: Rule) -> Selection:
    """How far each message got with each group, for the text of a finding."""
    return Selection(
        table="delivery_v1",
        columns=(Column("key", "key"), Column("consumer_group", "consumer_group"), Column("state", "state")),
        key="key",
        equals=_topic(rule),
        span="log_id",
        in_broker=True,
    )


def _topic(rule: Rule) -> tuple[tuple[str, str], ...]:
    topic = ("topic", rule.topic)
    return (topic,) if rule.tag is None else (topic, ("tag", rule.tag))
