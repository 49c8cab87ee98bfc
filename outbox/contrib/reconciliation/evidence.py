"""Reads the evidence of a finding again, from the primary servers.

See decision 050.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Final
from uuid import UUID

from django.db import DataError, transaction
from django.db.backends.base.base import BaseDatabaseWrapper
from psycopg import sql
from psycopg.types.json import JsonbLoader

from outbox.contrib.django.database.aliases import broker_executor
from outbox.contrib.reconciliation.plan import Effects, RepairStep, RuleSource
from outbox.errors import BrokerError, UsageError
from outbox.message import Message

# The broker stores a half message before the local transaction writes the row: earlier by at most the duration of this
# transaction. Check-back parks a half message before its local transaction can last as long as _BEFORE_ROW.
_BEFORE_ROW: Final = timedelta(hours=72)
# The statement has two conditions on the key: the first uses the index, the second compares the exact text.
_ROW: Final = "SELECT * FROM {table} WHERE {key} = %s AND ({key})::text = %s{when} LIMIT 2 FOR SHARE"
_OF_KEY: Final = (
    "SELECT message_id, state FROM {view} WHERE topic = %(topic)s AND key = %(key)s "
    "AND (%(tag)s::text IS NULL OR tag = %(tag)s) AND stored_at >= %(since)s{when} ORDER BY log_id"
)
# Selects messages whose key is not %(key)s, but whose body contains one of %(texts)s. Python parses only the bodies of
# these messages.
_NAMING: Final = (
    "SELECT message_id, state, key, content_type, body FROM {view} WHERE topic = %(topic)s AND key <> %(key)s "
    "AND (%(tag)s::text IS NULL OR tag = %(tag)s) AND stored_at >= %(since)s AND state <> 'rolled_back'{when} "
    "AND EXISTS (SELECT FROM unnest(%(texts)s::bytea[]) text WHERE position(text IN body) > 0) "
    "ORDER BY log_id LIMIT %(most)s"
)
# Selects messages of other keys whose bodies may be %(size)s bytes long with the key of the row, which a body may name
# several times. Python compares only the bodies of these messages.
_LIKE: Final = (
    "SELECT message_id, state, key, body FROM {view} WHERE topic = %(topic)s AND key <> %(key)s "
    "AND (%(tag)s::text IS NULL OR tag = %(tag)s) AND stored_at >= %(since)s AND stored_at < %(until)s "
    "AND state <> 'rolled_back'{when} AND content_type = %(content_type)s AND abs(octet_length(body) - %(size)s) "
    "<= 16 * abs(octet_length(key) - octet_length(%(key)s)) ORDER BY log_id LIMIT %(most)s"
)
_COUNTED: Final = (
    "SELECT key FROM {view} WHERE topic = %(topic)s AND key = ANY(%(keys)s) "
    "AND (%(tag)s::text IS NULL OR tag = %(tag)s) AND stored_at >= %(since)s AND state <> 'rolled_back'{when} "
    "GROUP BY key HAVING count(*) > 1"
)
MOST_NAMING: Final = 10_000
# A repair reads several databases while its transaction holds the lock of a row. If a migration waits for that lock,
# and a read of the repair waits for the migration, PostgreSQL sees no deadlock.
_LIMIT_WAITING: Final = "SET LOCAL lock_timeout = '5s'"
_HAS_ROW: Final = "SELECT 1 FROM {table} WHERE {key} = %s AND ({key})::text = %s{when} LIMIT 1"
_OF_IDS: Final = "SELECT message_id, state FROM {view} WHERE message_id = ANY(%(ids)s) ORDER BY log_id"
_DEAD: Final = (
    "SELECT dead_at FROM {view} WHERE consumer_group = %(group)s AND message_id = %(message_id)s "
    "AND replayed_at IS NULL"
)


@dataclass(frozen=True, slots=True)
class BrokerMessage:
    """A message of the broker. Its `state` is a value of the column `state` of the view message_v1."""

    message_id: UUID
    state: str


def lock_row(connection: BaseDatabaseWrapper, source: RuleSource, key: str) -> list[dict[str, Any]]:
    """Return the rows of the key that satisfy the rule (at most two), locked until the transaction ends.

    The values have the types of a Django model's fields.
    """
    statement = _ROW.format(table=_literal(source.table), key=_literal(source.key), when=_and(source.when))
    with connection.cursor() as cursor:
        # Django leaves jsonb to its JSONField, so its cursors read jsonb as text.
        cursor.adapters.register_loader("jsonb", JsonbLoader)
        cursor.execute(statement, [key, key])
        names = [column[0] for column in cursor.description]
        return [dict(zip(names, row, strict=True)) for row in cursor.fetchall()]


def messages_of(source: RuleSource, step: RepairStep, row_at: datetime) -> list[BrokerMessage]:
    """Return the rule's messages in the broker that have the key of `step`."""
    statement = _of_rule(_OF_KEY, source)
    values = {"topic": source.topic, "tag": source.tag, "key": step.key, "since": row_at - _BEFORE_ROW}
    return [BrokerMessage(*row) for row in _rows(statement, "message_v1", values)]


def has_effect(connection: BaseDatabaseWrapper, effects: Effects, key: str) -> bool:
    """Return whether the group has an effect for the key."""
    return _is_there(connection, effects.table, effects.key, effects.when, key)


def message_naming(
    connection: BaseDatabaseWrapper, source: RuleSource, step: RepairStep, row_at: datetime
) -> BrokerMessage | None:
    """Return a message of another key whose body contains the key of `step`, or None if there is no such message.

    The function ignores messages that belong to another row: a row with the key of the message exists, and no other
    message has that key, or the rule allows several messages per row. Raises UsageError if too many bodies contain the
    text of the key.
    """
    statement = _of_rule(_NAMING, source)
    values = {"topic": source.topic, "tag": source.tag, "key": step.key, "since": row_at - _BEFORE_ROW}
    found = _rows(statement, "message_v1", {**values, "texts": _written(step.key), "most": MOST_NAMING})
    naming = [row for row in found if _names(bytes(row[4]), row[3], step.key)]
    surplus = set() if source.messages == "at_least_one" else _with_several(source, [row[2] for row in naming], values)
    known: dict[str, bool] = {}
    for message_id, state, key, _, _ in naming:
        if key not in known:
            known[key] = _is_there(connection, source.table, source.key, source.when, key)
        if key in surplus or not known[key]:
            return BrokerMessage(message_id, state)
    if len(found) == MOST_NAMING:
        raise UsageError(
            f"more than {MOST_NAMING} messages of topic {source.topic!r} contain the text {step.key!r}, and outbox "
            "does not parse more bodies. Find out whether one of these messages belongs to this row. If not, "
            "publish a message for this row by hand."
        )
    return None


def message_under_former_key(
    connection: BaseDatabaseWrapper, source: RuleSource, step: RepairStep, row_at: datetime, made: Message
) -> tuple[BrokerMessage, str] | None:
    """Return a message whose key has no row and whose body is that of `made` but for the key, with this key; else None.

    It is probably the message of the row of `step`, whose key was changed. A reconciliation reports both keys as one
    finding, but a plan may be older than the change. Raises UsageError if too many bodies are of this length.
    """
    document = _document(made.body, made.content_type)
    if document is None:
        return None
    statement = _of_rule(_LIKE, source)
    about = {"topic": source.topic, "tag": source.tag, "key": step.key, "content_type": made.content_type}
    times = {"since": row_at - _BEFORE_ROW, "until": row_at + _BEFORE_ROW}
    found = _rows(statement, "message_v1", {**about, **times, "size": len(made.body), "most": MOST_NAMING})
    known: dict[str, bool] = {}
    for message_id, state, key, body in found:
        if not _is_like(document, _document(bytes(body), made.content_type), step.key, key):
            continue
        if key not in known:
            known[key] = _is_there(connection, source.table, source.key, source.when, key)
        if not known[key]:
            return BrokerMessage(message_id, state), key
    if len(found) == MOST_NAMING:
        raise UsageError(
            f"more than {MOST_NAMING} messages of topic {source.topic!r} are as long as the message of this row, and "
            "outbox does not compare more bodies. Find out whether the key of the row was changed after its message "
            "was sent. If not, publish a message for this row by hand."
        )
    return None


def _with_several(source: RuleSource, keys: Sequence[str], values: Mapping[str, Any]) -> set[str]:
    """Return those of `keys` that have more than one message."""
    statement = _of_rule(_COUNTED, source)
    return {row[0] for row in _rows(statement, "message_v1", {**values, "keys": list(set(keys))})} if keys else set()


def _is_there(connection: BaseDatabaseWrapper, table: str, key: str, when: str | None, value: str) -> bool:
    statement = _HAS_ROW.format(table=_literal(table), key=_literal(key), when=_and(when))
    # If the text is not a valid value of the column's type, no row has this key.
    with suppress(DataError), transaction.atomic(using=connection.alias), connection.cursor() as cursor:
        cursor.execute(_LIMIT_WAITING)
        cursor.execute(statement, [value, value])
        return cursor.fetchone() is not None
    return False


def _written(key: str) -> list[bytes]:
    """Return the forms that the key may have in a body.

    These are the key itself, the key as JSON escapes it, and for a UUID the forms without hyphens or in capitals.
    """
    texts = {key, json.dumps(key)[1:-1], json.dumps(key)[1:-1].replace("/", "\\/")}
    with suppress(ValueError):
        identifier = UUID(key)
        texts |= {form for text in (str(identifier), identifier.hex) for form in (text, text.upper())}
    return [text.encode() for text in sorted(texts)]


def _names(body: bytes, content_type: str, key: str) -> bool:
    """Return whether the key is a value in a JSON body, or a word in any other body."""
    text = body.decode("utf-8", "replace")
    document = _document(body, content_type)
    if document is not None:
        return any(_same(value, key) for value in _values(document))
    words = "|".join(re.escape(form.decode()) for form in _written(key))
    return re.search(rf"(?<!\w)(?:{words})(?!\w)", text) is not None


def _document(body: bytes, content_type: str) -> object:
    """Return the value of a JSON body, with its numbers as texts; None for any other body."""
    with suppress(ValueError, RecursionError):
        if content_type.startswith("application/json"):
            return json.loads(body.decode("utf-8", "replace"), parse_int=str, parse_float=str)
    return None


def _is_like(ours: object, theirs: object, our_key: str, their_key: str) -> bool:
    """Return whether two JSON values are equal, except that each has its own key."""
    waiting = [(ours, theirs)]
    while waiting:
        one, other = waiting.pop()
        if isinstance(one, dict) and isinstance(other, dict) and one.keys() == other.keys():
            waiting += [(value, other[name]) for name, value in one.items()]
        elif isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
            waiting += zip(one, other, strict=True)
        elif isinstance(one, str) and isinstance(other, str):
            if one != other and not (_same(one, our_key) and _same(other, their_key)):
                return False
        elif one is not other:
            return False
    return True


def _values(document: object) -> Iterator[str]:
    waiting = [document]
    while waiting:
        value = waiting.pop()
        if isinstance(value, dict):
            waiting += value.values()
        elif isinstance(value, list):
            waiting += value
        elif isinstance(value, str):
            yield value


def _same(value: str, key: str) -> bool:
    if value == key:
        return True
    with suppress(ValueError):
        return UUID(value) == UUID(key)
    return False


def message(message_id: UUID) -> BrokerMessage | None:
    """Return the message with this id; None if the broker has no such message."""
    rows = _rows(_OF_IDS, "message_v1", {"ids": [message_id]})
    return BrokerMessage(*rows[0]) if rows else None


def dead_since(group: str, message_id: UUID) -> datetime | None:
    """Return the time at which the message became a dead letter of the group.

    The result is None if the message is not a dead letter of the group, or if it was replayed.
    """
    rows = _rows(_DEAD, "dead_letter_v1", {"group": group, "message_id": message_id})
    return rows[0][0] if rows else None


def _of_rule(statement: str, source: RuleSource) -> str:
    """Return the statement with the condition of the rule; its braces are no placeholders."""
    return statement.replace("{when}", _and(source.message_when).replace("{", "{{").replace("}", "}}"))


def _and(condition: str | None) -> str:
    return f" AND {_literal(condition)}" if condition else ""


def _literal(fragment: str) -> str:
    """Return the SQL with each % escaped, so that the driver does not read it as a placeholder."""
    return fragment.replace("%", "%%")


def _rows(statement: str, view: str, values: Mapping[str, Any]) -> Sequence[tuple[Any, ...]]:
    with broker_executor() as run:
        recovering = run.connection.execute("SELECT pg_is_in_recovery()").fetchone()
        if recovering is None or recovering[0]:
            raise BrokerError("the broker's alias leads to a replica, which may lack newer messages: use the primary.")
        # The statement contains SQL of the rules unchanged. This is safe, because the author of a plan may also write
        # the rules.
        text = sql.SQL(statement).format(view=sql.Identifier(run.schema, view))
        with run.connection.transaction():
            run.connection.execute(_LIMIT_WAITING)
            return run.connection.execute(text, values).fetchall()
