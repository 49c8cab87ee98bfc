"""The columns that a run reads from the broker's published views and from the business tables.

The views belong to the broker (`outbox/broker/schema`), and the name of a view ends with its version.
docs/reconciliation/rules.md describes the views. A test compares the views in this module with the views of an
installed broker.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from ..rules.rule import FieldType, Rule
from .base import Column, ColumnKind, TableSelection

_TYPES: Final = {
    "message_id": "uuid",
    "transaction_id": "uuid",
    "body": "bytea",
    "queue_id": "integer",
    "attempt": "smallint",
    **dict.fromkeys(("log_id", "retention_seconds", "start_offset", "queue_offset"), "bigint"),
}


def _columns(names: str) -> dict[str, str]:
    return {
        name: "timestamp with time zone" if name.endswith("_at") else _TYPES.get(name, "text") for name in names.split()
    }


# The columns that a run reads from each view, with their PostgreSQL types.
VIEWS: Final[dict[str, dict[str, str]]] = {
    "message_v1": _columns(
        "log_id message_id transaction_id topic key tag content_type headers body stored_at deliver_at state "
        "decided_by decided_at"
    ),
    "delivery_v1": _columns("consumer_group topic log_id key tag state"),
    "dead_letter_v1": _columns("consumer_group log_id topic key tag dead_at replayed_at"),
    "timed_out_v1": _columns("consumer_group log_id topic key tag stored_at timed_out_at"),
    "topic_v1": _columns("topic retention_seconds pruned_at"),
    # `archive --erase` reads the next view.
    "erased_v1": _columns("kind topic value replacement"),
    # A run reads the next three views if a group has no owed_when.
    "group_v1": _columns("consumer_group topic filter"),
    "offset_v1": _columns("consumer_group topic queue_id start_offset"),
    "queue_entry_v1": _columns("queue_id queue_offset log_id attempt"),
}
MESSAGE_STATES: Final = ("committed", "recalled", "rolled_back", "parked", "undecided")

_TIMESTAMP, _BIGINT = ColumnKind.TIMESTAMP, ColumnKind.BIGINT
ROW_KIND: Final = 0
EFFECT_KIND: Final = 10
_DETAILS: Final = ("message_id", "transaction_id", "tag", "decided_by")

# One read covers all selections of a database, so all selections must have the same columns. Rows and effects have the
# columns kind, key, at, f0, f1, … The broker's messages have the columns key, at, log_id, decided_at, …


def rows(rule: Rule, *, detailed: bool = False) -> TableSelection:
    """The business rows that must have produced a message, with the compared columns as f0, f1, …

    With `detailed`, the texts are in their bounded form: the second look compares them in this form.
    """
    return TableSelection(
        table=rule.table,
        columns=(
            Column("kind", str(ROW_KIND), _BIGINT),
            Column("key", rule.key),
            Column("at", rule.time, _TIMESTAMP, FieldType.TIMESTAMP),
            *_compared(rule, dict(enumerate(field.column for field in rule.fields)), detailed=detailed),
        ),
        key=rule.key,
        time=rule.time,
        conditions=(rule.when,) if rule.when else (),
    )


def _compared(rule: Rule, names: Mapping[int, str], *, detailed: bool) -> Iterator[Column]:
    """The columns f0, f1, … of the rule's fields; `names` has the table's column of each compared field."""
    text = ColumnKind.BOUNDED if detailed else ColumnKind.TEXT
    kinds = {FieldType.TIMESTAMP: ColumnKind.MICROSECONDS, FieldType.TEXT: text}
    for place, field in enumerate(rule.fields):
        if place in names:
            yield Column(f"f{place}", names[place], kinds.get(field.type, ColumnKind.TEXT), field.type)
        else:
            yield Column(f"f{place}", "(NULL)")


def effects(rule: Rule, number: int, *, detailed: bool = False) -> TableSelection:
    """The effects of the rule's group `number`.

    For a group without an effect table, the run reads from the broker which deliveries the group has passed, and counts
    each of these deliveries as an effect. The selection then has the same columns as the messages. A delivery has no
    time, because the broker stores no time per offset.
    """
    group = rule.groups[number]
    if group.table is None:
        columns = _broker_columns(rule, {"state": f"'effect {number}'"}, detailed=detailed)
        passed = (("consumer_group", group.name), ("state", "passed"))
        return _of_topic(rule, "delivery_v1", columns, passed, time="stored_at")
    return TableSelection(
        table=group.table,
        columns=(
            Column("kind", str(EFFECT_KIND + number), _BIGINT),
            Column("key", group.key or group.message_id or ""),
            Column("at", group.time or "", _TIMESTAMP, FieldType.TIMESTAMP),
            *_compared(
                rule, {place: name for name, place in (*group.compare_effect, *group.sum_effect)}, detailed=detailed
            ),
        ),
        key=group.key or group.message_id or "",
        time=group.time,
        conditions=(group.when,) if group.when else (),
    )


def messages(rule: Rule, *, detailed: bool = False) -> TableSelection:
    """The messages of the rule's topic (and tag); `detailed` adds columns that only a finding shows."""
    names = {"at": "stored_at", "decided_at": "decided_at", "deliver_at": "deliver_at", "state": "state"}
    more = {name: name for name in ("content_type", "body", *_DETAILS)} | {"owed": owed(rule)}
    columns = _broker_columns(rule, {**names, **more}, detailed=detailed)
    conditions = (rule.message_when,) if rule.message_when else ()
    return _of_topic(rule, "message_v1", columns, time="stored_at", conditions=conditions)


def owed(rule: Rule) -> str:
    """An SQL expression for the groups that owe an effect for a message: bit n is set if the rule's group n owes an
    effect."""
    bits = [
        f"CASE WHEN {group.owed_when} THEN {1 << number} ELSE 0 END" if group.owed_when else str(1 << number)
        for number, group in enumerate(rule.groups)
    ]
    return f"({' + '.join(bits)})" if bits else "0"


def message_ids() -> TableSelection:
    """The ids of the messages of all topics, because an inbox may have messages of several topics."""
    names = ("message_id", "key", "topic", "tag")
    return TableSelection(
        table="message_v1",
        columns=(*(Column(name, name) for name in names), Column("log_id", "log_id", _BIGINT)),
        key="message_id",
        time="stored_at",
        span="log_id",
        in_broker=True,
    )


def dead_letters(rule: Rule, *, detailed: bool = False) -> TableSelection:
    """The dead letters of the topic that were not replayed. The selection has the same columns as the messages."""
    columns = _broker_columns(rule, {"at": "dead_at", "state": "'dead ' || consumer_group"}, detailed=detailed)
    return _of_topic(rule, "dead_letter_v1", columns, span=None, conditions=("replayed_at IS NULL",))


def timed_out(rule: Rule, *, detailed: bool = False) -> TableSelection:
    """The messages of the topic that a group did not handle, because their time limit was over. The selection has the
    same columns as the messages."""
    given = {"at": "timed_out_at", "state": "'timed out ' || consumer_group"}
    columns = _broker_columns(rule, given, detailed=detailed)
    return _of_topic(rule, "timed_out_v1", columns, time="stored_at", is_optional=True)


def deliveries(rule: Rule) -> TableSelection:
    """The state of each message in each group, for the text of a finding."""
    texts = (Column(name, name) for name in ("consumer_group", "state"))
    columns = (Column("key", "key"), Column("log_id", "log_id", _BIGINT), *texts)
    return _of_topic(rule, "delivery_v1", columns)


def _broker_columns(rule: Rule, given: dict[str, str], *, detailed: bool = False) -> tuple[Column, ...]:
    kinds = {"at": _TIMESTAMP, "decided_at": _TIMESTAMP, "deliver_at": _TIMESTAMP, "body": ColumnKind.BINARY}
    kinds["owed"] = _BIGINT
    names = ["at", "decided_at", "deliver_at", "state", "content_type", "body"]
    if rule.has_conditional_groups:
        names.append("owed")
    if detailed:
        names += _DETAILS
    elif rule.has_several_messages:
        # Who decided a message says how close its decision is to the commit of its transaction.
        names.append("decided_by")
    rest = [Column(name, given.get(name, "(NULL)"), kinds.get(name, ColumnKind.TEXT)) for name in names]
    return (Column("key", "key"), Column("log_id", "log_id", _BIGINT), *rest)


def _of_topic(
    rule: Rule,
    view: str,
    columns: tuple[Column, ...],
    equals: tuple[tuple[str, str], ...] = (),
    span: str | None = "log_id",
    **more: Any,
) -> TableSelection:
    """The rows of a view of the broker that have the rule's topic and tag. `more` has further fields."""
    named = [("topic", rule.topic), *([] if rule.tag is None else [("tag", rule.tag)])]
    return TableSelection(
        table=view, columns=columns, key="key", equals=(*named, *equals), span=span, in_broker=True, **more
    )
