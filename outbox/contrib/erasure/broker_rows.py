"""Erase the content of messages in the broker's tables, and remember the erasures.

An erasure keeps the rows, ids, tags and times of the messages, so that the log, the queues and a reconciliation stay
complete. It replaces bodies, headers, the keys if this is requested, and the texts of errors.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final, LiteralString
from uuid import UUID

from outbox import hooks
from outbox.broker.database.arrays import bigints, texts
from outbox.broker.database.executor import Executor
from outbox.broker.database.statement import Statement
from outbox.broker.log import recall
from outbox.broker.log.topics import find_topic_id
from outbox.erased import ERASED_CONTENT_TYPE, KEPT_HEADERS
from outbox.recall import RecallStatus
from outbox.transaction import STILL_RUNNING

# At most this many messages are erased by one call of `erase`, so that one statement does not lock rows for long.
BATCH: Final = 1_000


@dataclass(frozen=True, kw_only=True, slots=True)
class Erasure:
    """One erasure: its kind and value, as the table `erased` and the list of erasures store them.

    `kind`: message (`value` is the message's id), key (`value` is the fingerprint of the topic's key) or subject
    (`value` is the id of the subject's encryption key). `replacement` is the text that replaces the keys of the
    messages; None keeps the keys.
    """

    kind: str
    topic: str = ""
    value: str
    replacement: str | None = None
    reason: str
    at: datetime

    @property
    def place(self) -> tuple[str, str, str]:
        """The primary key of the erasure."""
        return self.kind, self.topic, self.value


def fingerprint(secret: str, topic: str, key: str) -> str:
    """Return the keyed hash (HMAC-SHA256, hexadecimal) of a topic's key.

    The list of erasures has this hash instead of the key. Without the secret, the hash of a guessed key cannot be
    computed.
    """
    return hmac.new(secret.encode(), f"{topic}\x00{key}".encode(), hashlib.sha256).hexdigest()


@dataclass(frozen=True, slots=True)
class Erasable:
    """A stored message."""

    log_id: int
    message_id: UUID
    transaction_id: UUID
    key: str
    stored_at: datetime


# The topic is given by its number: PostgreSQL uses the index of a searchable topic only if it knows the number when it
# plans.
_FOUND: Final = """
SELECT log_id, message_id, transaction_id, key, stored_at
FROM {schema}.commit_log
WHERE topic_id = %(topic_id)s AND """
_OF_KEYS: Final = Statement(_FOUND + "key = ANY(%(keys)s::text[]) ORDER BY log_id")
_OF_IDS: Final = Statement(_FOUND + "message_id = ANY(%(ids)s::uuid[]) ORDER BY log_id")

_KEYS: Final = Statement("""
SELECT DISTINCT topic.name, key FROM {schema}.commit_log JOIN {schema}.topic USING (topic_id)
WHERE topic.name = ANY(%(topics)s::text[]) AND key <> ''
""")


def find_keys(run: Executor, topic: str, keys: Sequence[str]) -> list[Erasable]:
    """Return all messages of the topic with these keys, in any state. Reads the whole log if it is not searchable."""
    values = {"topic_id": find_topic_id(run, topic), "keys": texts(keys)}
    return run.objects(Erasable, _OF_KEYS, values, prepare=False)


def find_ids(run: Executor, topic: str, message_ids: Sequence[UUID]) -> list[Erasable]:
    """Return the messages of the topic with these ids, in any state."""
    values = {"topic_id": find_topic_id(run, topic), "ids": list(message_ids)}
    return run.objects(Erasable, _OF_IDS, values, prepare=False)


def keys_with(run: Executor, secret: str, wanted: Iterable[tuple[str, str]]) -> dict[tuple[str, str], str]:
    """Return the stored keys whose fingerprints are `wanted`, as (topic, fingerprint) and key.

    The function reads all keys of these topics.
    """
    places = set(wanted)
    topics = sorted({topic for topic, _ in places})
    found = {}
    for topic, key in run.rows(_KEYS, {"topics": texts(topics)}) if topics else ():
        if (place := (topic, fingerprint(secret, topic, key))) in places:
            found[place] = key
    return found


# ---------------------------------------------------------------------------------------------------------------------
# Each entry of _PLACES is a table with content of messages: a name, a condition, and the new values. A statement never
# changes a row that is erased already, so the number of changed rows is the number of newly erased rows. Dead letters
# come before the log, in the order in which an edit of a dead letter locks the two.

# Keeps the type of the error, which the class of an exception names, and erases its text.
_ERROR: Final = "coalesce(substring({} FROM '^[A-Za-z_][A-Za-z0-9_]*:') || ' ', '') || '(erased)'"
_OPEN: Final = "right({}, 8) <> '(erased)' AND ({} OR {} LIKE ANY(%(patterns)s::text[]))"
_MESSAGE: Final = "log_id = ANY(%(log_ids)s::bigint[])"
_TRANSACTION: Final = "transaction_id = ANY(%(transaction_ids)s::uuid[])"
_TOPIC: Final = "topic_id = %(topic_id)s"


def _error(table: LiteralString, column: LiteralString, linked: LiteralString) -> tuple[str, Statement]:
    return table, Statement(
        "UPDATE {schema}." + table + " SET " + column + " = " + _ERROR.replace("{}", column)
        + " WHERE " + _OPEN.replace("{}", column, 1).replace("{}", linked, 1).replace("{}", column)
    )  # fmt: skip


def _text(table: LiteralString, column: LiteralString, linked: LiteralString) -> tuple[str, Statement]:
    return table, Statement(
        "UPDATE {schema}." + table + " SET " + column + " = '(erased)'"
        " WHERE NOT starts_with(" + column + ", '" + STILL_RUNNING + "') AND "
        + _OPEN.replace("{}", column, 1).replace("{}", linked, 1).replace("{}", column)
    )  # fmt: skip


_PLACES: Final[Sequence[tuple[str, Statement]]] = (
    _error("dead_letter", "error", _MESSAGE),
    ("commit_log", Statement("""
UPDATE {schema}.commit_log
SET body = '', content_type = %(erased)s, key = coalesce(%(replacement)s::text, key),
    headers = (SELECT jsonb_object_agg(name, value)
               FROM jsonb_each(CASE WHEN jsonb_typeof(headers) = 'object' THEN headers END) AS given (name, value)
               WHERE name = ANY(%(kept)s::text[]))
WHERE log_id = ANY(%(log_ids)s::bigint[])
  AND (content_type <> %(erased)s OR (%(replacement)s::text IS NOT NULL AND NOT starts_with(key, 'erased:')))
""")),
    ("held", Statement("""
UPDATE {schema}.held SET key = %(replacement)s::text
WHERE log_id = ANY(%(log_ids)s::bigint[]) AND %(replacement)s::text IS NOT NULL AND NOT starts_with(key, 'erased:')
""")),
    _error("failure", "error", _MESSAGE),
    _text("quarantined_message", "evidence", _MESSAGE),
    _text("check_history", "detail", _TRANSACTION),
    _text("pending_check", "last_answer", _TRANSACTION),
    _text("incident", "detail", """subject = ANY(%(ids)s::text[]) OR kind = 'outage' AND EXISTS (
    SELECT FROM {schema}.topic
    WHERE topic_id = %(topic_id)s AND right(subject, length(name) + 4) = ' on ' || name)"""),
    _error("outage", "error", _TOPIC),
    _error("queue_lease", "stopped", """queue_id IN (
    SELECT queue_id FROM {schema}.queue JOIN {schema}.topic USING (topic_id)
    WHERE topic_id = %(topic_id)s OR retry_of IN (SELECT group_id FROM {schema}.subscription
                                                  WHERE subscription.topic_id = %(topic_id)s))"""),
)  # fmt: skip


def erase(
    run: Executor,
    topic: str,
    messages: Sequence[Erasable],
    *,
    replacement: str | None = None,
    patterns: Sequence[str] = (),
) -> dict[str, int]:
    """Erase the content of these messages of one topic in the open transaction, and recall those that wait.

    Return the number of changed rows by table, without tables in which nothing has changed. `replacement` replaces the
    keys. Texts of errors that match one of the `patterns` (SQL's LIKE) are erased too, whatever message they are about.
    The texts of the topic's outages and stopped queues are erased, because they do not name their message.

    A second call with the same messages changes nothing.
    """
    recalled = recall.recall(run, [one.message_id for one in messages])
    ids = {str(one.message_id) for one in messages} | {str(one.transaction_id) for one in messages}
    parameters: Mapping[str, Any] = {
        "erased": ERASED_CONTENT_TYPE,
        "kept": texts(sorted(KEPT_HEADERS)),
        "replacement": replacement,
        "patterns": texts(list(patterns)),
        "log_ids": bigints([one.log_id for one in messages]),
        "transaction_ids": [one.transaction_id for one in messages],
        "ids": texts(sorted(ids)),
        # After a restore, the topic of an erasure may not exist yet.
        "topic_id": find_topic_id(run, topic),
    }
    counts = {"recalled": sum(one.status is RecallStatus.RECALLED for one in recalled)}
    for table, path in hooks.broker_content.items():
        counts[table] = hooks.resolved(path)(run, parameters)
    for table, statement in _PLACES:
        counts[table] = run.count(statement, parameters)
    return {table: count for table, count in counts.items() if count}


# ---------------------------------------------------------------------------------------------------------------------
# The table `erased`.

_DONE: Final = Statement("SELECT kind, topic, value, erased_at FROM {schema}.erased")
_REPLACEMENT: Final = Statement("""
SELECT replacement FROM {schema}.erased WHERE kind = 'key' AND topic = %(topic)s AND value = %(value)s
""")
_STORE: Final = Statement("""
INSERT INTO {schema}.erased AS known (kind, topic, value, replacement, reason, erased_at)
VALUES (%(kind)s, %(topic)s, %(value)s, %(replacement)s, %(reason)s, %(at)s)
ON CONFLICT (kind, topic, value) DO UPDATE
SET replacement = coalesce(excluded.replacement, known.replacement), reason = excluded.reason,
    erased_at = greatest(known.erased_at, excluded.erased_at)
""")


def replacement_of(run: Executor, topic: str, value: str) -> str | None:
    """Return what replaces the key with this fingerprint since an earlier erasure; None if it was not replaced."""
    found = run.row(_REPLACEMENT, {"topic": topic, "value": value})
    return None if found is None else found[0]


def done(run: Executor) -> dict[tuple[str, str, str], datetime]:
    """Return the erasures that were done in these tables, by `Erasure.place`, with the time of the newest one."""
    return {(kind, topic, value): at for kind, topic, value, at in run.rows(_DONE)}


def store(run: Executor, erasures: Iterable[Erasure]) -> None:
    """Store that these erasures were done."""
    for one in erasures:
        names = ("kind", "topic", "value", "replacement", "reason", "at")
        run.execute(_STORE, {name: getattr(one, name) for name in names})
