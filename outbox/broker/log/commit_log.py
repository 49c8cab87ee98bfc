"""Append decided and half messages to the commit log, with one statement per call.

A message whose id is already stored is not stored again. Rows are inserted in the order of the call, and messages of
one key keep this order. The message ids of a call are ascending, so concurrent resends of one call cannot deadlock.

A batch outside of a transaction is first stored without ON CONFLICT, which takes a sixth less of the server's CPU, and
after a UniqueViolation with it. COPY would take less still, but returns no log ids and cannot leave out stored
messages.

The id of a transaction is the id of its first message, so a producer knows it before it sends, and the log needs no
index by transaction: the other messages of the call have the same xid, and the index of half messages finds them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any, Final, TypeVar
from uuid import UUID

from psycopg.errors import UniqueViolation
from psycopg.pq import TransactionStatus

from outbox.broker.database import arrays
from outbox.broker.database.executor import Executor, Row
from outbox.broker.database.sender import all_rows
from outbox.broker.database.server_identity import ServerIdentity
from outbox.broker.database.statement import (
    BIGINT,
    BOOLEAN,
    BYTEA,
    FLOAT8,
    INTEGER,
    TEXT,
    TIMESTAMPTZ,
    UUID_,
    Statement,
)
from outbox.broker.log.topics import Prepared, TopicCatalog
from outbox.errors import InvalidMessage, SendFailed, TransactionalMessagesRejected
from outbox.message import Message, SendReceipt
from outbox.transaction import Decision, HalfTransaction

_Value = TypeVar("_Value")

# PostgreSQL ends a session that sends 1 GiB with one statement. This leaves room for keys, tags and headers.
_MAX_CALL_BYTES: Final = 512 * 1024 * 1024

# All messages of a call, as half messages or with the decision COMMIT. The functions in outbox/broker/schema/functions/
# have the INSERTs: a publisher may execute the functions, and needs no right on the tables (docs/decisions/235).
_BATCH: Final = Statement("""
SELECT * FROM {schema}.append_batch(
    %(transaction_id)s, %(message_ids)s::uuid[], %(born)s::timestamptz[], %(deliver)s::timestamptz[],
    %(topics)s::integer[], %(shards)s::integer[], %(keys)s::text[], %(tags)s::text[], %(types)s::text[],
    %(headers)s::jsonb[], %(bodies)s::bytea[], %(delays)s::float8[], %(one_topic)s, %(one_tag)s::text,
    %(one_type)s::text, %(producer_group)s::text, %(transactional)s, %(half)s, %(immunity)s::integer,
    %(ledger_id)s::uuid, %(all_new)s
)
""")

# One message. `_one` returns the first eleven parameters.
_ONE: Final = Statement(
    """
    SELECT * FROM {schema}.append_one(
        $1, $2, $3, $4, $5, $6, $7, $8::text::jsonb, $9, $10, $11, $12, $13, $14, $15, $16
    )
    """,
    (
        *(UUID_, INTEGER, INTEGER, TEXT, TEXT, TEXT, BYTEA, TEXT, TIMESTAMPTZ, TIMESTAMPTZ, FLOAT8),
        *(TEXT, BOOLEAN, BOOLEAN, INTEGER, UUID_),
    ),
    (BIGINT, TEXT, TEXT),
)

_FIND: Final = Statement("""
SELECT message_id, log_id, transaction_id, half, decision FROM {schema}.stored_messages(%(message_ids)s::uuid[])
""")

_REJECTS: Final = Statement("SELECT reject_transactional FROM {schema}.broker")


def append_decided(
    run: Executor,
    catalog: TopicCatalog,
    messages: Sequence[Message],
    *,
    producer_group: str = "",
    transactional: bool | None = False,
) -> list[SendReceipt]:
    """Store messages together with the decision COMMIT, in the connection's present transaction.

    In the application's own transaction (`transactional`), the messages commit or roll back with this transaction. In
    autocommit the messages are visible at once. `transactional=None` says that the local transaction has already
    committed.

    Raises the errors of TopicCatalog.prepare. Raises InvalidMessage when a message id belongs to another call. If
    `transactional` is true, raises TransactionalMessagesRejected when the operator has switched transactional messages
    off.
    """
    if not messages:
        return []
    rows = catalog.prepare(run.connection, messages, transactional=transactional)
    return append_prepared(run, rows, producer_group=producer_group, transactional=bool(transactional))[0]


def append_prepared(
    run: Executor, rows: Sequence[Prepared], *, producer_group: str, transactional: bool
) -> tuple[list[SendReceipt], ServerIdentity]:
    """Do the same as `append_decided` for at least one prepared message; also return the server that stored them.

    The atomic path needs the server, because the caller's connection may reach another server than before.
    """
    try:
        if len(rows) == 1:
            [(log_id, started_at, database)] = all_rows(
                run, _ONE, (*_one(rows[0]), producer_group, transactional, False, None, None)
            )
            log_ids = [] if log_id is None else [log_id]
        else:
            given = {"producer_group": producer_group, "transactional": transactional}
            log_ids, started_at, database = _store_all(run, rows, given)
    except UniqueViolation as error:
        raise _sent_with_others(rows[0].message) from error
    return _receipts(run, rows, log_ids or [], transactional=transactional), ServerIdentity(str(started_at), database)


_NOT_HALF: Final = {"half": False, "immunity": None, "ledger_id": None}


def _store_all(run: Executor, rows: Sequence[Prepared], values: dict[str, Any]) -> Any:
    parameters = _NOT_HALF | _many(rows) | values
    connection = run.connection
    # With ON CONFLICT, PostgreSQL takes a quarter more CPU to store a message. So outside of a transaction, a batch is
    # first stored without it. If a message is already stored, this fails, and the batch is then stored with it.
    if connection.autocommit and connection.info.transaction_status == TransactionStatus.IDLE:
        with contextlib.suppress(UniqueViolation):
            return run.one(_BATCH, parameters | {"all_new": True}, prepare=True)
    return run.one(_BATCH, parameters | {"all_new": False}, prepare=True)


def append_half(
    run: Executor, catalog: TopicCatalog, half: HalfTransaction, *, default_immunity_seconds: int | None = None
) -> list[SendReceipt]:
    """Store the messages of a half transaction. Consumers do not see these messages until the transaction is decided.

    If `half` has no immunity of its own, the messages are stored with `default_immunity_seconds`, so that every scan
    applies the same immunity, regardless of the settings of the scanning process.

    The connection is in autocommit. Raises TransactionalMessagesRejected when the operator has switched half messages
    off.
    """
    rows = catalog.prepare(run.connection, half.messages, transactional=True)
    immunity_seconds = default_immunity_seconds if half.immunity_seconds is None else half.immunity_seconds
    if len(rows) == 1:
        values = (half.producer_group, True, True, immunity_seconds, half.ledger_id)
        [(log_id, _, _)] = all_rows(run, _ONE, (*_one(rows[0]), *values))
        log_ids = [] if log_id is None else [log_id]
    else:
        given = {
            "half": True,
            "transactional": True,
            "immunity": immunity_seconds,
            "ledger_id": half.ledger_id,
            "producer_group": half.producer_group,
        }
        try:
            log_ids = _store_all(run, rows, given)[0] or []
        except UniqueViolation as error:
            raise _sent_with_others(half.messages[0]) from error
    return _receipts(run, rows, log_ids, transactional=True, half=True)


def _sent_with_others(message: Message) -> InvalidMessage:
    return InvalidMessage(
        f"message {message.message_id} was sent before, in a call with other messages: send the same messages again, "
        f"or give new messages new ids. No message of this call was stored."
    )


def _check_not_rejecting(run: Executor, messages: Sequence[Message]) -> None:
    [rejects] = run.one(_REJECTS)
    if rejects:
        raise TransactionalMessagesRejected(
            f"the broker refuses transactional messages (its operator switched them off): message "
            f"{messages[0].message_id} for topic {messages[0].topic!r} was not stored. Try again once "
            f"`outbox_transaction accept` has switched transactional messages on."
        )


def _one(row: Prepared) -> tuple[Any, ...]:
    """Return the first eleven parameters of `_ONE`."""
    message = row.message
    return (
        message.message_id,
        row.known.topic_id,
        row.shard,
        message.key,
        message.tag,
        message.content_type,
        message.body,
        arrays.dump_headers(message.headers) if message.headers else None,
        message.born_at,
        message.deliver_at,
        None if message.delay is None else message.delay.total_seconds(),
    )


def _many(rows: Sequence[Prepared]) -> dict[str, Any]:
    messages = [row.message for row in rows]
    if (size := sum(len(message.body) for message in messages)) > _MAX_CALL_BYTES:
        raise InvalidMessage(
            f"the {len(messages)} messages of one call have bodies of {size:,} bytes, and the limit is "
            f"{_MAX_CALL_BYTES:,}. No message of this call was stored. Publish them with several calls, which may be "
            "in one transaction."
        )
    topics, one_topic = _unless_equal([row.known.topic_id for row in rows])
    tags, one_tag = _unless_equal([message.tag for message in messages])
    types, one_type = _unless_equal([message.content_type for message in messages])
    return {
        "transaction_id": messages[0].message_id,
        "message_ids": arrays.uuids([message.message_id for message in messages]),
        "born": arrays.times([message.born_at for message in messages]),
        "deliver": arrays.times([message.deliver_at for message in messages]),
        "delays": arrays.durations([message.delay for message in messages]),
        "topics": arrays.integers(topics),
        "one_topic": one_topic,
        "shards": arrays.optional_integers([row.shard for row in rows]),
        "keys": arrays.texts([message.key for message in messages]),
        "tags": arrays.texts(tags),
        "one_tag": one_tag,
        "types": arrays.texts(types),
        "one_type": one_type,
        "headers": arrays.header_maps([message.headers for message in messages]),
        "bodies": arrays.blobs([message.body for message in messages]),
    }


def _unless_equal(values: list[_Value]) -> tuple[list[_Value], _Value]:
    return ([] if values.count(values[0]) == len(values) else values), values[0]


def _receipts(
    run: Executor, rows: Sequence[Prepared], log_ids: Sequence[int], *, transactional: bool, half: bool = False
) -> list[SendReceipt]:
    transaction_id = rows[0].message.message_id
    if len(log_ids) == len(rows):
        # PostgreSQL assigned the log ids in the order of the call.
        receipts = []
        for row, log_id in zip(rows, log_ids, strict=True):
            item = row.message
            receipts.append(
                SendReceipt(
                    message_id=item.message_id, transaction_id=transaction_id, topic=item.topic, position=log_id
                )
            )
        return receipts
    messages = [row.message for row in rows]
    if transactional:
        _check_not_rejecting(run, messages)
    wanted = arrays.uuids([message.message_id for message in messages])
    stored = {row.message_id: row for row in run.objects(Row, _FIND, {"message_ids": wanted})}
    return [
        _existing(message, stored.get(message.message_id), transaction_id if half else None) for message in messages
    ]


def _existing(message: Message, stored: Row | None, half_of: UUID | None) -> SendReceipt:
    half = half_of is not None
    if stored is None:
        raise SendFailed(f"message {message.message_id} for topic {message.topic!r} was not stored; send it again.")
    if stored.half != half:
        kind = "transactional" if stored.half else "plain"
        raise InvalidMessage(
            f"message {message.message_id} is stored already, as a {kind} message: give the new message a new id."
        )
    if half and stored.decision is not None:
        # The first transaction of this message is already decided. A second local transaction could not change the
        # decision.
        raise InvalidMessage(
            f"half message {message.message_id} for topic {message.topic!r} was sent before, and its transaction is "
            f"already decided ({Decision(stored.decision).name}): build a new message for another transaction."
        )
    if half and stored.transaction_id != half_of:
        raise InvalidMessage(
            f"half message {message.message_id} for topic {message.topic!r} already belongs to transaction "
            f"{stored.transaction_id}, so it cannot also belong to transaction {half_of}: build a new message for "
            f"another transaction."
        )
    return SendReceipt(
        message_id=message.message_id,
        transaction_id=stored.transaction_id,
        topic=message.topic,
        position=stored.log_id,
    )
