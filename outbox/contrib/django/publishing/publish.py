"""`publish` binds messages to the open local transaction. Without a transaction, it needs `at_once=True`.

This file has the whole way of a publish call: the message, the open transaction, the path, and what each path does up
to its last report after COMMIT. The locks of FIFO keys, and what options of parts do, are at its end.

The atomic path: if the application's connection leads to the broker's own database, that connection writes the message
as part of its transaction. The two-phase path has these steps inside `atomic()`: FIFO key lock, ledger row, half
message, business work, COMMIT, end message. The broker has stored the half message before the business work continues.
An engine may store some messages as rows of its own instead of half messages (`Engine.store_rows`).

See decision 022, decision 026 and decision 076.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, fields, replace
from datetime import datetime, timedelta
from typing import Any, Final, ParamSpec, TypeVar, cast
from uuid import UUID

import psycopg
from asgiref.sync import sync_to_async
from django.db import connections, transaction
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.utils import DatabaseError, IntegrityError, InterfaceError, OperationalError, ProgrammingError
from django.utils.asyncio import async_unsafe
from psycopg import pq
from psycopg.errors import InvalidSchemaName, UndefinedFunction, UndefinedTable

from outbox import tracing
from outbox.arguments import key_text, unreadable, wait_of, with_timeout
from outbox.broker.database.executor import Executor
from outbox.broker.database.sender import begin
from outbox.broker.database.server_identity import ServerIdentity, find_mark, marked
from outbox.broker.log import incidents
from outbox.broker.log.commit_log import append_prepared
from outbox.broker.log.incidents import Incident, IncidentKind
from outbox.broker.schema.install import missing
from outbox.broker.transaction.fencing import check_epoch
from outbox.contrib.django.database import effects
from outbox.contrib.django.database.aliases import broker_database, place_named_by
from outbox.contrib.django.database.database_errors import naming
from outbox.contrib.django.database.django_internals import (
    WatchedBlocks,
    connections_of_thread,
    is_test_case,
    rollback_cause,
    running_loop,
    set_rollback_cause,
)
from outbox.contrib.django.database.in_tests import refuse_in_tests
from outbox.contrib.django.database.transactions import (
    BlockHalves,
    BlockWatch,
    begun_by_hand,
    cause_of_rollback,
    in_test_case,
    in_transaction,
    is_missing_table,
    sync_pipeline,
    watch_of,
)
from outbox.contrib.django.engine.broker import BodyStep, CurrentEngine, current_engine, get_broker
from outbox.contrib.django.ledger import ledger
from outbox.contrib.django.ledger.ledger_checker import open_connection
from outbox.contrib.django.settings.conf import OutboxSettings, aware
from outbox.declared_types import NOT_GIVEN, typed_message
from outbox.errors import (
    BrokerUnavailable,
    ConfigurationError,
    InvalidMessage,
    OutboxError,
    SendFailed,
    TransactionAlreadyRolledBack,
    TransactionRequired,
    TransactionUsageError,
    UsageError,
    WrongDatabase,
)
from outbox.hooks import Draft, Option
from outbox.message import Message, MessageWithOptions, SendReceipt
from outbox.ports import Broker
from outbox.transaction import Decision, EndTransaction, HalfTransaction, ProducerEpoch
from outbox.utils import measures
from outbox.utils.faults import armed, point
from outbox.utils.ids import uuid7
from outbox.utils.safe_text import shown_text, shown_value

logger = logging.getLogger(__name__)

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")

# psycopg makes new objects for each reading of `Connection.info.transaction_status`; libpq's own number is free.
_IDLE: Final = pq.TransactionStatus.IDLE
_IN_TRANSACTION: Final = pq.TransactionStatus.INTRANS


def publish(
    topic: str | object,
    body: Any = NOT_GIVEN,
    *options: Option,
    key: object = "",
    tag: str = "",
    headers: Mapping[str, str] | None = None,
    delay: float | timedelta | None = None,
    deliver_at: datetime | None = None,
    timeout: float | timedelta | None = None,
    immunity_seconds: int | None = None,
    using: str | None = None,
    at_once: bool = False,
) -> SendReceipt:
    """Publish one message and return its receipt.

    `publish(topic, body)` publishes a body without a type, and `publish(value)` publishes a value of a declared type
    (docs/events.md) to the topic of its type. Arguments replace the key and tag that come from the type.

    Inside `atomic()`, the message is delivered if and only if the transaction of `atomic()` commits. Outside of
    `atomic()`, `publish` raises TransactionRequired. If no row belongs to the message, pass `at_once=True` there: the
    message is then sent before `publish` returns. Inside `atomic()`, `at_once=True` is refused. The topic's codec
    encodes `body` (the default codec is JSON). `key` orders messages on FIFO topics; ints and UUIDs are written as
    text. On topics of type DELAY, `delay` or `deliver_at` postpones the delivery. `delay` is a number of seconds or a
    timedelta. The delay begins when the broker stores the message. If USE_TZ is on, `deliver_at` is an aware datetime.
    `timeout` (seconds or a timedelta) is the time limit of the message: if no handler has begun within this time after
    the message was due, the message is not delivered. `immunity_seconds` is how long the broker waits before its first
    check of this transaction (default OUTBOX['IMMUNITY_SECONDS']). Choose a larger number for a transaction that runs
    for a long time. If transactions are open on several aliases, pass one of these aliases as `using`: the message then
    belongs to the transaction on this alias.

    `options` come from parts, whose documents explain them. If an option finds that the message is a duplicate, nothing
    is published, and `duplicate_of` of the receipt is the id of the other message.

    Raises UsageError for a message that can never be sent. Raises BrokerError if the broker did not store the message.
    After each of these errors, the surrounding atomic block is marked for rollback, even if the caller swallows the
    error.
    """
    try:
        current = current_engine()
        built = build(
            topic,
            body,
            options,
            key=key,
            tag=tag,
            headers=headers,
            delay=delay,
            deliver_at=deliver_at,
            timeout=timeout,
            current=current,
        )
        published = publish_bound(
            [built], immunity_seconds=immunity_seconds, using=using, at_once=at_once, current=current
        )
        return published.receipts[0]
    except BaseException as error:
        # This is `errors_roll_back_the_block`, without the time that a context manager takes.
        mark_for_rollback(using, error)
        raise


def publish_many(
    topic: str | Iterable[object],
    bodies: Iterable[Any] | Option | Callable[[Any], Option] | None = None,
    *options: Option | Callable[[Any], Option],
    key: object | Callable[[Any], object] = "",
    tag: str | Callable[[Any], str] = "",
    headers: Mapping[str, str] | None = None,
    delay: float | timedelta | None = None,
    deliver_at: datetime | None = None,
    timeout: float | timedelta | None = None,
    immunity_seconds: int | None = None,
    using: str | None = None,
    at_once: bool = False,
) -> list[SendReceipt]:
    """Publish one message per body, with one transaction id and one statement. The broker stores all messages or none.

    `publish_many(topic, bodies)` publishes bodies without a type, and `publish_many(values)` values of declared types.

    `key`, `tag` and the options may be functions of a body. `key=None` is the same as no key, but a function must not
    return None. Duplicates are left out, and their receipts have `duplicate_of`. The other parameters are the same as
    for `publish`. If your messages differ in other fields or in their topics, build each with `message`, and pass all
    to `publish_messages`.
    """
    with errors_roll_back_the_block(using):
        if not isinstance(topic, str):
            if isinstance(bodies, Option) or callable(bodies):
                options = (bodies, *options)
                bodies = None
            if bodies is None:
                bodies = cast(Iterable[Any], topic)
        if not isinstance(bodies, Iterable) or isinstance(bodies, (str, bytes, Mapping)):
            raise UsageError(
                f"publish_many to {topic!r}: pass a list of bodies, not {bodies!r:.80}; for one body, call publish()."
            )
        if key is None:
            key = ""
        built = [
            build(
                topic if isinstance(topic, str) else body,
                body if isinstance(topic, str) else NOT_GIVEN,
                [one(body) if callable(one) else one for one in options] if options else (),
                key=key(body) if callable(key) else key,
                tag=tag(body) if callable(tag) else tag,
                headers=headers,
                delay=delay,
                deliver_at=deliver_at,
                timeout=timeout,
            )
            for body in bodies
        ]
        return list(publish_bound(built, immunity_seconds=immunity_seconds, using=using, at_once=at_once).receipts)


def publish_messages(
    messages: Sequence[Message],
    *,
    immunity_seconds: int | None = None,
    using: str | None = None,
    at_once: bool = False,
) -> list[SendReceipt]:
    """Publish messages that `message` has made, all of them or none.

    The messages may have different topics. Otherwise like `publish`.
    """
    with errors_roll_back_the_block(using):
        given = messages_of(messages, "publish_messages")
        return list(publish_bound(given, immunity_seconds=immunity_seconds, using=using, at_once=at_once).receipts)


def _awaitable(
    function: Callable[Parameters, Result], description: str
) -> Callable[Parameters, Coroutine[Any, Any, Result]]:
    @functools.wraps(function)
    async def call(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        # With thread_sensitive, the function runs on the thread of the async code's database calls, and so in the same
        # transaction as these calls.
        return await sync_to_async(function, thread_sensitive=True)(*args, **kwargs)

    call.__name__ = call.__qualname__ = f"a{function.__name__}"
    call.__doc__ = description
    return call


apublish = _awaitable(
    publish,
    """An async `publish`.

    In an async subscriber, the message belongs to the transaction of the subscriber. In an async function with
    @transactional_message, the message belongs to the transaction of this function.

    Elsewhere in async code, where Django has no transactions, pass `at_once=True`, or call `publish` inside `atomic()`
    in a function of `sync_to_async`. If the await is cancelled, the call does not stop, so the broker may store the
    message.
    """,
)
apublish_many = _awaitable(publish_many, """An async `publish_many`; otherwise like `apublish`.""")
apublish_messages = _awaitable(publish_messages, """An async `publish_messages`; otherwise like `apublish`.""")


# -- messages --------------------------------------------------------------------------------------
#
# The functions below build messages from an application's values: a body, a key, a delay.


def message(
    topic: str | object,
    body: Any = NOT_GIVEN,
    *options: Option,
    key: object = "",
    tag: str = "",
    headers: Mapping[str, str] | None = None,
    delay: float | timedelta | None = None,
    deliver_at: datetime | None = None,
    timeout: float | timedelta | None = None,
) -> Message:
    """Return an encoded message for `publish_messages`, of a topic and a body, or of a value of a declared type.

    The parameters are the same as for `publish`. The body is encoded now, before a transaction needs to be open.
    Publish the message soon: a part may have stored its body elsewhere, for a limited time (docs/large-bodies.md).
    Raises UsageError, or SendFailed if a storage does not answer.
    """
    return build(
        topic,
        body,
        options,
        key=key,
        tag=tag,
        headers=headers,
        delay=delay,
        deliver_at=deliver_at,
        timeout=timeout,
    )


def build(
    topic: str | object,
    body: Any,
    options: Sequence[Option],
    *,
    key: object,
    tag: str,
    headers: Mapping[str, str] | None,
    delay: float | timedelta | None,
    deliver_at: datetime | None,
    timeout: float | timedelta | None,
    current: CurrentEngine | None = None,
) -> Message:
    """Like `message`, with the options in one sequence: it takes less time to pass them on.

    `current`: the engine of this process, if the caller has read it already.
    """
    if not isinstance(topic, str):
        if isinstance(body, Option):
            body, options = NOT_GIVEN, (body, *options)
        topic, body, key, tag, headers = typed_message(topic, body, key, tag, headers)
    elif body is NOT_GIVEN:
        raise UsageError(f"topic {topic!r}: no body was passed. Nothing was published. Pass a topic and a body.")
    current = current or current_engine()
    encoded, content_type = current.codecs.encode(topic, body)
    draft = None
    if options or current.body_steps:
        draft = Draft(topic, encoded, content_type, headers)
        try:
            for option in options:
                check_option(option, f"topic {topic!r}")
                option.encode(draft)
        except (OutboxError, DatabaseError):
            raise
        except Exception as error:
            raise unreadable(topic, error) from error
        for step in current.body_steps:
            step.encode(draft)
        encoded, content_type, headers = draft.body, draft.content_type, draft.headers
    try:
        built = Message(
            topic=topic,
            body=encoded,
            message_id=uuid7() if draft is None else draft.message_id,
            content_type=content_type,
            key=key if type(key) is str else key_text(key),
            tag=tag,
            headers=headers or {} if timeout is None else with_timeout(topic, headers, timeout),
            delay=None if delay is None else wait_of(topic, delay, deliver_at),
            deliver_at=aware(deliver_at) if isinstance(deliver_at, datetime) else deliver_at,
        )
        if options and (kept := [option for option in options if option.is_kept]):
            values = {one.name: getattr(built, one.name) for one in fields(built)}
            built = MessageWithOptions(**values, options=kept)
    except OutboxError:
        raise
    except Exception as error:
        raise unreadable(topic, error) from error
    if draft is not None:
        for finish in draft.when_valid:
            finish()
    return built


def check_option(option: object, where: str) -> None:
    """Raise UsageError if a positional argument after the body is not an option of a part."""
    if not isinstance(option, Option):
        raise UsageError(
            f"{where}: the argument {shown_value(option)} after the body is not an option of a part. Nothing was "
            "published. Pass the key, the tag and the like by name, such as key=…"
        )


def messages_of(given: Iterable[Message], name: str) -> list[Message]:
    """Return the given messages as a list.

    Raises UsageError if `given` is not an iterable of messages. The text of this error begins with `name`, such as
    "publish_messages".
    """
    found: list[Any] = list(given) if isinstance(given, Iterable) else [given]
    wrong = [item for item in found if not isinstance(item, Message)]
    if wrong or isinstance(given, Message):
        raise UsageError(
            f"{name}: pass a list of messages made by message(…), not {(wrong or [given])[0]!r:.80}. Nothing was "
            "published."
        )
    return found


# -- one publish call ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Published:
    """The receipts of one publish call. On the two-phase path, the object also has the call's half message.

    `xid` is the database's id of the local transaction (see ledger.insert_committed). `are_there` says whether the
    messages that the engine has stored as rows are still in the transaction.
    """

    receipts: Sequence[SendReceipt]
    half: HalfTransaction | None = None
    xid: str = ""
    are_there: Callable[[], bool] | None = None

    @property
    def is_stored(self) -> bool:
        """Whether the call has stored a message. If not, all its messages are duplicates."""
        return any(receipt.duplicate_of is None for receipt in self.receipts)


@async_unsafe(
    "publish() waits for databases, so a coroutine must not call it. Write `await apublish(…)`. In an async "
    "subscriber or in @transactional_message, a message of apublish() belongs to the transaction, too."
)
def _outside_of_coroutines() -> None:
    """Raise SynchronousOnlyOperation in a coroutine."""


def publish_bound(
    messages: Sequence[Message],
    *,
    using: str | None = None,
    immunity_seconds: int | None = None,
    producer: ProducerEpoch | None = None,
    at_once: bool = False,
    current: CurrentEngine | None = None,
) -> Published:
    """Like `publish_messages`. `current`: the engine of this process, if the caller has read it already.

    If `producer` is not the newest instance of its transactional id, the broker refuses the messages. If the call
    raises an error, the caller must roll back the block. The broker may have stored the half message before the error.
    Check-back rolls this half message back, because its ledger row is missing.
    """
    if not messages:
        return Published([])
    if running_loop() is not None:
        _outside_of_coroutines()
    current = current or current_engine()
    terms = _ORDINARY
    if immunity_seconds is not None or producer is not None:
        terms = _PublishTerms(immunity_seconds, producer)
    if tracing.tracer is None:
        return _publish(current, messages, using, terms, at_once)
    with tracing.tracer.publishing(messages) as traced:
        return _publish(current, traced, using, terms, at_once)


def _publish(
    current: CurrentEngine, messages: Sequence[Message], using: str | None, terms: _PublishTerms, at_once: bool
) -> Published:
    first = messages[0]
    if effects.refused_writes.get() is not None:
        effects.refuse(f"publish to {first.topic!r}")
    connection = connection_to_join(using)
    if terms.immunity_seconds is not None:
        check_immunity(first.topic, terms.immunity_seconds)
    if connection is None:
        refuse_without_transaction(messages, using, terms.immunity_seconds, at_once)
        return _publish_at_once(current, messages, using, terms)
    if at_once:
        raise _at_once_in_transaction(first, connection)
    what = functools.partial(_description, first)
    watch = require_whole(connection, what)
    if not watch.bound_to:
        watch.bind(f"the message for topic {first.topic!r}")
    started = time.perf_counter()
    try:
        server = _proven_server(connection, current)
        path: _Path = _publish_two_phase if server is None else functools.partial(_publish_atomic, server)
        if MessageWithOptions in map(type, messages):
            published = _publish_with_options(path, connection, current, watch, messages, terms)
        else:
            published = path(connection, current, watch, messages, terms)
    except Exception as error:
        _report_failure(messages, started, error)
        # `naming` is entered only after an error, because most calls succeed.
        with naming(what(), connection):
            raise
    if measures.recorder is not None:
        _report_duration(published, "two_phase" if server is None else "atomic", started)
    return published


@dataclass(frozen=True, slots=True)
class _PublishTerms:
    """The fields of a half transaction that the caller chooses (see HalfTransaction)."""

    immunity_seconds: int | None
    producer: ProducerEpoch | None


_ORDINARY: Final = _PublishTerms(None, None)


_Path = Callable[[BaseDatabaseWrapper, CurrentEngine, BlockWatch, Sequence[Message], "_PublishTerms"], Published]


def _description(first: Message) -> str:
    return f"publishing {first.message_id} for topic {first.topic!r}"


def _publish_at_once(
    current: CurrentEngine, messages: Sequence[Message], using: str | None, terms: _PublishTerms
) -> Published:
    settings = current.settings
    refuse_leak_from_test(settings, using)
    started = time.perf_counter()
    timeout_seconds = settings.send_timeout_seconds
    try:
        with _sending(current.body_steps, messages):
            receipts = current.broker_to_use().send(messages, timeout_seconds=timeout_seconds, producer=terms.producer)
    except Exception as error:
        _report_failure(messages, started, error)
        raise
    published = Published(receipts)
    _report_duration(published, "direct", started)
    return published


def _report_duration(published: Published, path: str, started: float) -> None:
    recorder = measures.recorder
    if recorder is not None and published.is_stored:
        topics = [receipt.topic for receipt in published.receipts if receipt.duplicate_of is None]
        recorder.published(topics, path, time.perf_counter() - started)


def _report_failure(messages: Sequence[Message], started: float, error: Exception) -> None:
    if measures.recorder is not None:
        seconds = time.perf_counter() - started
        measures.recorder.publish_failed([message.topic for message in messages], seconds, error)


# -- the open transaction --------------------------------------------------------------------------


def connection_to_join(using: str | None) -> BaseDatabaseWrapper | None:
    """The connection whose transaction a publish call joins; None if no transaction is open.

    `using` names the alias. Without `using`, this thread may have an open transaction on at most one alias. The
    transaction that a TestCase wraps around a test is ignored. Raises TransactionUsageError if transactions are open on
    several aliases, or if Django did not begin the transaction.
    """
    if using is not None:
        if not isinstance(using, str) or using not in connections:
            raise ConfigurationError(
                f"publish(…, using={shown_value(using)}): that alias is not in DATABASES; use one of "
                f"{', '.join(connections)}."
            )
        connection = connections[using]
        _refuse_manual_commit(connection)
        return connection if in_transaction(connection) else None
    # Each publish call runs this loop, so it calls no function for an ordinary block.
    found: list[BaseDatabaseWrapper] = []
    for connection in initialized_connections():
        if connection.connection is not None and not (connection.in_atomic_block and connection.commit_on_exit):
            _refuse_manual_commit(connection)
        if not all(map(is_test_case, connection.atomic_blocks)):
            found.append(connection)
    if len(found) > 1:
        aliases = ", ".join(sorted(repr(connection.alias) for connection in found))
        raise TransactionUsageError(
            f"transactions are open on {aliases}: name the alias of the transaction that the message belongs to: "
            "publish(…, using=…)."
        )
    return found[0] if found else None


def initialized_connections() -> Sequence[BaseDatabaseWrapper]:
    """Return what `connections.all(initialized_only=True)` returns, but in the order in which the code used them first.

    Each publish call asks, and Django's function takes three to five calls of Python functions for each alias.
    """
    if running_loop() is not None:
        return connections.all(initialized_only=True)
    found = dict(vars(connections_of_thread))
    found.pop("cvar", None)
    return list(found.values())


def require_whole(connection: BaseDatabaseWrapper, what: Callable[[], str]) -> BlockWatch:
    """Return the watch of a block if the block still has the transaction that it began with.

    Otherwise raise TransactionUsageError, which says that `what()` was not done. The caller then rolls the block back
    (see `errors_roll_back_the_block`). The atomic path needs this, too: after a ROLLBACK by hand, the message would
    commit in the next transaction, without the rows that it is about.
    """
    wrappers, raw = connection.execute_wrappers, connection.connection
    first = wrappers[0] if wrappers else None
    if isinstance(first, BlockWatch) and type(connection.atomic_blocks) is WatchedBlocks:
        watch = first
    else:
        watch = watch_of(connection)
    if connection.needs_rollback:
        cause = cause_of_rollback(connection) or ", for example because an error was caught in the block"
        raise TransactionUsageError(
            f"{what()} was not done: the atomic block on {connection.alias!r} is marked for rollback{cause}. Let that "
            "error leave the block, or put the code that may fail into an inner atomic()."
        ) from rollback_cause(connection)
    # Each publish call runs this, so the usual case on PostgreSQL calls no function.
    if isinstance(raw, psycopg.Connection) and not watch.ended_by and not raw.pgconn.pipeline_status:
        status = raw.pgconn.transaction_status
        if status == _IN_TRANSACTION or (status == _IDLE and not watch.is_begun):
            return watch
    try:
        reason = watch.what_ended()
    except psycopg.Error as error:
        reason = f"a statement in the psycopg pipeline failed ({str(error).strip()})"
    if reason:
        raise TransactionUsageError(
            f"{what()} was not done: the atomic block on {connection.alias!r} has lost its transaction: {reason}. Put "
            "a statement that may fail into an inner atomic(), and do not execute COMMIT or ROLLBACK by hand."
        )
    return watch


def _refuse_manual_commit(connection: BaseDatabaseWrapper) -> None:
    if connection.in_atomic_block:
        manual = not connection.commit_on_exit
    elif connection.connection is None:
        # Do not open a connection only to read its autocommit mode: the message may have nothing to do with this
        # database.
        manual = not connection.settings_dict["AUTOCOMMIT"]
    else:
        manual = not connection.autocommit
    if not manual and begun_by_hand(connection):
        raise TransactionUsageError(
            f"a transaction was begun by hand on {connection.alias!r}, and outbox cannot see when it commits: put "
            f"the write and the publish call into `with transaction.atomic(using={connection.alias!r})` instead of "
            "BEGIN and COMMIT. If the message belongs to another database, name its alias: publish(…, using=…)."
        )
    if manual:
        raise TransactionUsageError(
            f"the connection {connection.alias!r} is in manual-commit mode (autocommit is off), and outbox cannot "
            "see when it commits: turn AUTOCOMMIT on and put the write and the publish call into `with "
            f"transaction.atomic(using={connection.alias!r})`. If the message belongs to another database, name "
            "its alias: publish(…, using=…)."
        )


@contextmanager
def errors_roll_back_the_block(using: str | None) -> Iterator[None]:
    """Mark the atomic block of a publish call for rollback if the call fails for any reason.

    Otherwise a caller that catches the error would commit its row without the message.
    """
    try:
        yield
    except BaseException as error:
        mark_for_rollback(using, error)
        raise


def mark_for_rollback(using: str | None, cause: BaseException) -> None:
    """Mark the atomic block that a publish call joins for rollback, because of its error `cause`.

    The next error of the block names the first cause: it is the `__cause__` of Django's TransactionManagementError. If
    it is not clear which transaction the call joins, no block is marked, because the error of the call then gives the
    reason.
    """
    with suppress(TransactionUsageError, ConfigurationError):
        connection = connection_to_join(using)
        if connection is not None:
            if not connection.needs_rollback and isinstance(cause, Exception):
                set_rollback_cause(connection, cause)
            connection.set_rollback(True)


# -- the path --------------------------------------------------------------------------------------
#
# Each process proves the path of an alias once, and verifies the path with every message.
#
# The proof is a lock (see outbox.broker.database.server_identity). The broker's connection takes the lock, and the
# application's connection must see this lock. The result of the proof is valid until the process ends, so a failover
# never changes the path silently.
#
# A proof opens a session. One thread of a process proves, and the threads that need the same proof wait for it, so a
# worker whose threads all publish their first message at once does not open a session for each of them.

_proving = threading.RLock()


def _renew_after_fork() -> None:
    # A thread of the parent may have held the lock.
    global _proving
    _proving = threading.RLock()


os.register_at_fork(after_in_child=_renew_after_fork)


def _proven_server(connection: BaseDatabaseWrapper, current: CurrentEngine) -> ServerIdentity | None:
    """The broker's server if this connection's open transaction writes the messages itself, else None.

    The transaction writes them (the atomic path) if the connection reaches the broker's own database; otherwise
    publishing takes the two-phase path.
    Raises WrongDatabase if OUTBOX['BROKER'] names the alias of this connection, but the connection does not reach the
    broker. Raises BrokerUnavailable or SendFailed if the path could not be determined.
    """
    if not current.has_database:
        return None
    if "django.test.utils" in sys.modules:
        refuse_in_tests(current.settings.broker)
    if connection.vendor != "postgresql":
        return None
    is_broker = connection.alias == current.settings.broker
    named = current.place if is_broker else place_named_by(connection.alias)
    if named in current.paths:
        return current.paths[named]
    with _one_prover(current.settings) as left_seconds:
        if named in current.paths:
            return current.paths[named]
        proven = prove(connection, current.settings, left_seconds)
        if proven is not None or not is_broker:
            current.paths[named] = proven
            return proven
    raise _reported(_elsewhere(connection, current.settings), connection.alias, current)


def _confirm(connection: BaseDatabaseWrapper, current: CurrentEngine, place: ServerIdentity) -> None:
    """Verify that this connection has written its row into the broker's own database.

    Call it if `place`, which stored the row, is not the proven server: after a restart, or because the connection
    now leads to another server. The function repeats the proof in the same transaction. Raises the errors of `prove`.
    Raises WrongDatabase if the broker is not on that server; after this error the transaction must not commit.
    """
    settings = current.settings
    named = current.place if connection.alias == settings.broker else place_named_by(connection.alias)
    with _one_prover(settings) as left_seconds:
        # Another thread may have proven the same server meanwhile.
        if current.paths.get(named) == place or prove(connection, settings, left_seconds) == place:
            current.paths[named] = place
            return
    raise _reported(_elsewhere(connection, settings), connection.alias, current)


@contextmanager
def _one_prover(settings: OutboxSettings) -> Iterator[float]:
    """Wait until no other thread proves, and give the seconds that are left for a proof.

    Raises BrokerUnavailable if the other threads take `send_timeout_seconds`.
    """
    lock, ends_at = _proving, time.monotonic() + settings.send_timeout_seconds
    if not lock.acquire(timeout=settings.send_timeout_seconds):
        raise BrokerUnavailable(
            "other threads of this process wait for the broker's answer about the path, and this call has waited for "
            f"them for {settings.send_timeout_seconds:g} s. Nothing was published; check the broker's connection "
            "settings and that its PostgreSQL runs."
        )
    try:
        yield max(0.0, ends_at - time.monotonic())
    finally:
        lock.release()


def prove(connection: BaseDatabaseWrapper, settings: OutboxSettings, timeout_seconds: float) -> ServerIdentity | None:
    """The broker's server if this connection reaches the broker's own server and database, else None.

    Raises BrokerUnavailable if the broker does not answer, and SendFailed if this connection does not answer.
    """
    with marked(broker_database(settings), timeout_seconds=timeout_seconds) as key:
        try:
            with connection.wrap_database_errors:
                return find_mark(connection.connection, key)
        except (DatabaseError, InterfaceError) as error:
            raise SendFailed(
                f"the connection {connection.alias!r} did not answer whether it reaches the broker: "
                f"{str(error).strip()}. Nothing was published; run the whole operation again, in a new transaction."
            ) from error


# A process records at most one incident per alias in this number of seconds. Without this limit, every publish call
# would record the same problem again.
_REPORT_EVERY_SECONDS: Final = 60.0


def _reported(error: WrongDatabase, alias: str, current: CurrentEngine) -> WrongDatabase:
    """Record the error as an incident in the broker, because only this process sees the error. Returns the error.

    If the incident cannot be recorded, the function only logs this failure, because the caller must get `error`.
    """
    now, reports, settings = time.monotonic(), current.path_reports, current.settings
    if now - reports.get(alias, -_REPORT_EVERY_SECONDS) >= _REPORT_EVERY_SECONDS:
        reports[alias] = now
        subject = f"alias {alias!r} of process {os.getpid()} on {socket.gethostname()}"
        try:
            with broker_database(settings).connect(name="outbox-path") as broker:
                found = Incident(IncidentKind.PATH, subject, str(error))
                incidents.record(Executor(broker, settings.schema), [found])
        except (OutboxError, psycopg.Error) as failure:
            logger.warning("the incident of the wrong database of %s could not be recorded: %s", subject, failure)
    return error


def _elsewhere(connection: BaseDatabaseWrapper, settings: OutboxSettings) -> WrongDatabase:
    if connection.alias == settings.broker:
        expected = "although OUTBOX['BROKER'] names this alias (a pooler, a list of hosts, an unfinished failover?):"
    else:
        expected = (
            "although it reached the broker's database before (a failover?). If this is intended, restart the "
            "process: messages then take the two-phase path. Otherwise"
        )
    return WrongDatabase(
        f"the connection {connection.alias!r} reaches another server or database than the broker's, {expected} let "
        f"this alias and the broker's alias reach the same primary server, then run the whole operation again. Nothing "
        f"was published."
    )


# -- the atomic path --------------------------------------------------------------------------------


def _publish_atomic(
    server: ServerIdentity,
    connection: BaseDatabaseWrapper,
    current: CurrentEngine,
    watch: BlockWatch,
    messages: Sequence[Message],
    terms: _PublishTerms,
) -> Published:
    raw: psycopg.Connection[Any] = connection.connection
    settings = current.settings
    try:
        if raw.pgconn.transaction_status == _IDLE:
            begin(raw)
        # From now on, a transaction that the driver's own commit() or rollback() has ended is noticed.
        watch.is_begun = True
        watch.written += 1
        rows = current.catalog.prepare(raw, messages, transactional=True)
        keys: list[tuple[str, str]] = []
        for row in rows:
            if row.known.locks_keys:
                keys.append((row.message.topic, row.message.key))
        if keys:
            lock_keys(connection, keys)
        run = Executor(raw, settings.schema)
        for step in current.body_steps:
            step.before_append(run, messages)
        if terms.producer is not None:
            check_epoch(run, terms.producer)
        receipts, place = append_prepared(run, rows, producer_group=settings.producer_group, transactional=True)
    except psycopg.Error as error:
        _note_failure(error)
        if isinstance(error, (UndefinedTable, UndefinedFunction, InvalidSchemaName)):
            raise missing(settings.schema, raw.info.dbname) from error
        raise
    if _has_failed:
        _note_success()
    if place != server:
        _confirm(connection, current, place)
    connection.on_commit(functools.partial(_wake_after_commit, current), robust=True)
    return Published(receipts)


# Whether an append has failed in this process since the last successful append.
_has_failed = False


def _note_failure(error: psycopg.Error) -> None:
    global _has_failed
    _has_failed = True
    get_broker().publishing_failed(error)


def _note_success() -> None:
    global _has_failed
    _has_failed = False
    get_broker().publishing_worked()


def _wake_after_commit(current: CurrentEngine) -> None:
    if armed:
        point("producer.after_local_commit")
    current.broker_at_commit().notify_decided()


# -- the two-phase path -----------------------------------------------------------------------------


def _publish_two_phase(
    connection: BaseDatabaseWrapper,
    current: CurrentEngine,
    watch: BlockWatch,
    messages: Sequence[Message],
    terms: _PublishTerms,
) -> Published:
    rows = current.engine.store_rows(connection, messages)
    if rows is None:
        return _publish_halves(connection, current, watch, messages, terms)
    halves = [item for item in messages if item.message_id not in rows.receipts]
    published = _publish_halves(connection, current, watch, halves, terms) if halves else Published([])
    receipts = {**rows.receipts, **{one.message_id: one for one in published.receipts}}
    return replace(published, receipts=[receipts[item.message_id] for item in messages], are_there=rows.are_there)


def _publish_halves(
    connection: BaseDatabaseWrapper,
    current: CurrentEngine,
    watch: BlockWatch,
    messages: Sequence[Message],
    terms: _PublishTerms,
) -> Published:
    settings = current.settings
    group = settings.producer_group or settings.required_producer_group()
    if not settings.in_memory and in_test_case(connection):
        raise leak_from_test(f"a half message for {messages[0].topic!r}")
    _lock_declared_keys(connection, current, messages)
    if armed:
        point("producer.before_ledger")
    xid, ledger_id = _enter_ledger(connection, messages[0], in_memory=settings.in_memory)
    if armed:
        point("producer.after_ledger")
    half = HalfTransaction(
        producer_group=group,
        messages=messages,
        ledger_id=ledger_id,
        immunity_seconds=terms.immunity_seconds,
        producer=terms.producer,
    )
    if armed:
        point("producer.before_half")
    # The guard of tests was asked before the path was chosen.
    send, timeout_seconds = current.broker.send_half, settings.send_timeout_seconds
    if current.body_steps:
        with _sending(current.body_steps, messages):
            receipts = send(half, timeout_seconds=timeout_seconds)
    else:
        receipts = send(half, timeout_seconds=timeout_seconds)
    if armed:
        point("producer.after_half")
    halves, transaction_id = watch.halves, messages[0].message_id
    halves.ids.append(transaction_id)
    # The result of an earlier look-up does not have this transaction.
    halves.in_ledger = None
    connection.on_commit(functools.partial(_after_commit, connection, current, half, halves), robust=True)
    return Published(receipts, half, xid)


@contextmanager
def _sending(steps: Sequence[BodyStep], messages: Sequence[Message]) -> Iterator[None]:
    with ExitStack() as stack:
        for step in steps:
            stack.enter_context(step.while_sending(messages))
        yield


def _lock_declared_keys(
    connection: BaseDatabaseWrapper, current: CurrentEngine, messages: Sequence[Message], *, is_atomic: bool = False
) -> None:
    """Lock the FIFO keys of topics as the settings declare them, or as this process has read them last.

    Raises UnknownTopic.

    A deployment may have changed a topic in the broker since this process has read its settings. On the atomic path,
    the open transaction may have created a topic. Another connection would wait for its end.
    """
    keys: list[tuple[str, str]] = []
    for item in messages:
        known = current.catalog.remembered(item.topic)
        if (declared := current.settings.topics.get(item.topic)) is not None:
            topic = declared.topic
        elif is_atomic:
            topic = current.catalog.get(connection.connection, item.topic).topic
        else:
            topic = current.broker_to_use().topic(item.topic)
        if (topic.key_lock and topic.is_fifo) or (known is not None and known.locks_keys):
            keys.append((item.topic, item.key))
    if keys:
        lock_keys(connection, keys)


# -- the ledger row ----------------------------------------------------------------------------------
#
# One statement writes the row and reads the ledger's id. If your code has set a search path, the publishing connection
# may reach another ledger than a new connection of the same alias. The publish call is then refused, because check-back
# uses a new connection, without that search path.


# The oid of the ledger's table, and the ledger's id from the table outbox_ledger_identity. The search path finds each
# of the two tables separately, so both values are compared.
_Ledger = tuple[int | None, UUID]

# The ledgers that a new connection of an alias has reached. An id always names the same ledger, so this set keeps its
# entries until the process ends.
_reachable: Final[set[tuple[str, int | None, int]]] = set()


def _enter_ledger(connection: BaseDatabaseWrapper, first: Message, *, in_memory: bool) -> tuple[str, UUID]:
    """Write the ledger row of a publish call. Returns the row's `xid` and the ledger's id.

    `first` is the first message of the call; its id is the transaction id. With a broker `in_memory`, check-back uses
    no other connection. Raises TransactionAlreadyRolledBack if the ledger has a tombstone. Raises ConfigurationError if
    the ledger is missing or check-back could not find it. After an exception, the caller must roll back the surrounding
    block.
    """
    alias = connection.alias
    try:
        entered = ledger.insert_committed(connection, first.message_id)
    except IntegrityError as error:
        raise TransactionAlreadyRolledBack(
            f"transaction {first.message_id} (topic {first.topic!r}) already has a ledger row: a check-back decided "
            "that it never committed, or the same message was published before. The surrounding atomic block is "
            "rolled back; run the whole operation again, with a new message."
        ) from error
    except (ProgrammingError, OperationalError) as error:
        if not is_missing_table(error):
            raise
        name = str(connection.settings_dict["NAME"])
        raise ConfigurationError(
            f"the ledger's tables are missing on {alias!r} (the database {name!r}). If this is the wrong database, "
            f"correct DATABASES. Otherwise run `manage.py migrate --database={alias}`. Nothing was published."
        ) from error
    if entered.ledger_id is None:
        raise ConfigurationError(
            f"the ledger on {alias!r} has no identity (the database was flushed?): run "
            f"`manage.py migrate --database={alias}`. Nothing was published."
        )
    if connection.vendor == "postgresql" and not in_memory:
        # Python hashes the number of an id faster than the id.
        known = (alias, entered.table_oid, entered.ledger_id.int)
        if known not in _reachable and _is_reachable(alias, (entered.table_oid, entered.ledger_id)):
            _reachable.add(known)
    return entered.xid, entered.ledger_id


def _is_reachable(alias: str, entered: _Ledger) -> bool:
    """Whether check-back reaches this ledger; False if this could not be found out."""
    try:
        found = _reached_from_outside(alias)
    except DatabaseError as error:
        # The publish call can continue, because the half message names the ledger in which the row of this call is.
        logger.warning("the ledger of %r could not be read on another connection: %s", alias, error)
        return False
    if found != entered:
        raise ConfigurationError(
            f"the search_path of this connection leads to another ledger than a new connection of {alias!r}, "
            f"which check-back uses. Keep outbox_ledger and outbox_ledger_identity only in one schema that is on "
            f"every search_path (public), or give each schema an alias of its own in DATABASES. Nothing was "
            f"published."
        )
    return True


def _reached_from_outside(alias: str) -> _Ledger | None:
    with closing(open_connection(alias)) as outside, outside.cursor() as cursor:
        # The publishing transaction may have locked the table. Without a lock timeout, the second connection would wait
        # for this transaction.
        cursor.execute("BEGIN; SET LOCAL lock_timeout = '1s'")
        try:
            return ledger.reached(outside)
        except ProgrammingError as error:
            if not is_missing_table(error):
                raise
            return None


# -- after COMMIT ------------------------------------------------------------------------------------
#
# The decision is reported if it is certain, otherwise a check is requested.
#
# Django runs the `on_commit` callbacks after COMMIT was executed, but the call of a callback does not prove a commit.
# If a statement failed and the application swallowed the error, PostgreSQL answers COMMIT with ROLLBACK and no error.
# Django also runs callbacks for work that a manual `savepoint_rollback` has undone. So the producer reports COMMIT only
# if the ledger row is visible. A missing row proves nothing, because a lagging replica may not have the row yet. If the
# row is missing, the producer asks for an early check.


def _after_commit(
    connection: BaseDatabaseWrapper, current: CurrentEngine, half: HalfTransaction, halves: BlockHalves
) -> None:
    if armed:
        point("producer.after_local_commit")
    if half.transaction_id in _in_ledger(connection, halves):
        end_soon(current.broker_at_commit(), half, Decision.COMMIT)
    else:
        current.broker_at_commit().hint_one_way(half.transaction_id)


def _in_ledger(connection: BaseDatabaseWrapper, halves: BlockHalves) -> set[UUID]:
    """Return the transaction ids of the block's half messages that have a committed ledger row.

    One look-up reads all these ids, on the connection that wrote the ledger rows.
    """
    if halves.in_ledger is None:
        try:
            sync_pipeline(connection)
            halves.in_ledger = ledger.committed(connection, halves.ids)
        except Exception as error:
            # Only log the error of the look-up, because the transaction has already ended. The look-up fails, for
            # example, if a new connection has replaced the connection of the transaction.
            logger.info(
                "the ledger on %r cannot be read now, so check-back will read it: %s",
                connection.alias,
                shown_text(error),
            )
            halves.in_ledger = set()
    return halves.in_ledger


def end_soon(broker: Broker, half: HalfTransaction, decision: Decision) -> None:
    """Report a decision to the broker without waiting for the answer."""
    if tracing.tracer is not None:
        tracing.tracer.decided(half, decision)
    end = EndTransaction(transaction_id=half.transaction_id, decision=decision, producer_group=half.producer_group)
    broker.end_one_way(end)


# -- messages with options ---------------------------------------------------------------------------


def _publish_with_options(
    path: _Path,
    connection: BaseDatabaseWrapper,
    current: CurrentEngine,
    watch: BlockWatch,
    messages: Sequence[Message],
    terms: _PublishTerms,
) -> Published:
    """Let the options decide which messages are duplicates, publish the others, and return all receipts.

    The FIFO keys are locked first. If they were locked after what an option locks, this transaction could hold the lock
    of the option and wait for a FIFO key, while the transaction with the FIFO key waits for the lock of the option.
    """
    _lock_declared_keys(connection, current, messages, is_atomic=path is not _publish_two_phase)
    if watch.traces is not None:
        watch.traces.has_key_locks = True
    duplicates = _duplicates(connection, messages)
    point("producer.after_options")
    left = [item for item in messages if item.message_id not in duplicates]
    published = path(connection, current, watch, left, terms) if left else Published([])
    stored = {receipt.message_id: receipt for receipt in published.receipts}
    transaction_id = next((receipt.transaction_id for receipt in published.receipts), messages[0].message_id)
    receipts = [
        stored.get(item.message_id)
        or SendReceipt(
            message_id=item.message_id,
            transaction_id=transaction_id,
            topic=item.topic,
            duplicate_of=duplicates[item.message_id],
        )
        for item in messages
    ]
    return replace(published, receipts=receipts)


def _duplicates(connection: BaseDatabaseWrapper, messages: Sequence[Message]) -> dict[UUID, UUID]:
    by_class: dict[type[Option], list[tuple[Message, Option]]] = {}
    for item in messages:
        if isinstance(item, MessageWithOptions):
            for option in item.options:
                by_class.setdefault(type(option), []).append((item, option))
    found: dict[UUID, UUID] = {}
    for kind, wanted in by_class.items():
        left = [one for one in wanted if one[0].message_id not in found]
        if left:
            found |= kind.admit(connection, left)
    return found


# -- refusals --------------------------------------------------------------------------------------
#
# If the required transaction is missing, or if a TestCase would publish to a real broker, `publish` refuses the message
# before it stores anything.


_MAX_IMMUNITY_SECONDS: Final = 366 * 24 * 3600


def check_immunity(topic: str, immunity_seconds: object) -> None:
    """Raise UsageError if `immunity_seconds` is neither None nor a number that the broker can store."""
    if immunity_seconds is None or (type(immunity_seconds) is int and 0 <= immunity_seconds <= _MAX_IMMUNITY_SECONDS):
        return
    raise UsageError(
        f"topic {topic!r}: immunity_seconds must be a whole number of seconds, 0 to {_MAX_IMMUNITY_SECONDS} (a year), "
        f"not {shown_value(immunity_seconds)}."
    )


def refuse_without_transaction(
    messages: Sequence[Message], using: str | None, immunity_seconds: int | None, at_once: bool
) -> None:
    """Raise TransactionRequired if a publish call needs a transaction. The caller found that none is open."""
    first = messages[0]
    if found := next((item for item in messages if isinstance(item, MessageWithOptions)), None):
        raise TransactionRequired(
            f"{shown_value(found.options[0])} for topic {found.topic!r} needs a transaction, to which its rows belong, "
            "but no transaction is open. Nothing was published. Put the publish call into `with "
            "transaction.atomic():`."
        )
    if immunity_seconds is not None:
        raise TransactionRequired(
            f"immunity_seconds={immunity_seconds} for topic {first.topic!r} applies to a transaction, but no "
            "transaction is open. Put the write and the publish call into `with transaction.atomic():`, or leave "
            "immunity_seconds out."
        )
    if at_once:
        return
    opened = [connection.alias for connection in connections.all(initialized_only=True) if in_transaction(connection)]
    elsewhere = f" If the message belongs to the open transaction on {opened[0]!r}, name this alias." if opened else ""
    place = "no transaction is open" if using is None else f"no transaction is open on {using!r}"
    block = "transaction.atomic()" if using is None else f"transaction.atomic(using={using!r})"
    raise TransactionRequired(
        f"the message for topic {first.topic!r} was not published: {place}, so the message would be sent even if your "
        f"code fails afterwards. Put the write and the publish call into `with {block}:`. If no write belongs to the "
        f"message, pass at_once=True.{elsewhere}"
    )


def _at_once_in_transaction(first: Message, connection: BaseDatabaseWrapper) -> TransactionUsageError:
    return TransactionUsageError(
        f"the message for topic {first.topic!r} was not published: at_once=True was passed, but a transaction is open "
        f"on {connection.alias!r}, and the message would be sent even if this transaction is rolled back. Leave "
        "at_once out, so that the message is published with the transaction. If the message does not belong to the "
        "transaction, publish it after the commit: `transaction.on_commit(lambda: publish(…, at_once=True), "
        f"using={connection.alias!r})`."
    )


def refuse_leak_from_test(settings: OutboxSettings, using: str | None) -> None:
    """Raise TransactionUsageError if a TestCase would publish to a real broker.

    The rollback of a TestCase does not remove messages from a real broker.
    """
    if settings.in_memory:
        return
    opened = [connections[using]] if using else connections.all(initialized_only=True)
    if any(in_test_case(connection) for connection in opened):
        raise leak_from_test("a message")


def leak_from_test(what: str) -> TransactionUsageError:
    """Return the error for a message that a TestCase would publish to a real broker."""
    return TransactionUsageError(
        f"{what} would be stored in a real broker, but the rollback of this TestCase does not remove it from there. "
        "Set OUTBOX['IN_MEMORY'] = True for tests, as OutboxTestMixin of outbox.contrib.django.testing does, or use "
        "TransactionTestCase."
    )


# -- the lock of a FIFO key ------------------------------------------------------------------------
#
# The local transaction locks each FIFO key before the message gets its log position, and holds the lock until the
# transaction ends.


# One statement takes all locks, in the order of the array, because unnest() returns the elements in this order.
_LOCK_POSTGRESQL: Final = "SELECT pg_advisory_xact_lock(number) FROM unnest(%s::bigint[]) AS number"
# Each lock uses the server's shared memory until the transaction ends. 16,000 locks at the same time have exhausted
# this memory.
MAX_KEYS: Final = 1_000

_LOCK_ROW: Final = "UPDATE outbox_key_lock SET taken = taken + 1 WHERE key_hash = %s"
_ADD_ROW: Final = "INSERT INTO outbox_key_lock (key_hash, taken) VALUES (%s, 0)"


def lock_keys(connection: BaseDatabaseWrapper, keys: Iterable[tuple[str, str]]) -> None:
    """Lock these (topic, key) pairs until the transaction ends.

    If another transaction has locked a pair, wait until it ends. The pairs are sorted, so that two publish calls with
    the same keys do not deadlock. Raises InvalidMessage if there are more than MAX_KEYS pairs.
    """
    numbers = sorted({_lock_number(topic, key) for topic, key in keys})
    if len(numbers) > MAX_KEYS:
        raise InvalidMessage(
            f"one call has {len(numbers)} different keys of FIFO topics, and the limit is {MAX_KEYS}, because each "
            "key is locked until the transaction ends. Nothing was published. Publish fewer messages in each "
            "transaction. If the order of messages from different transactions does not matter, declare the topic "
            "with key_lock=False."
        )
    if not numbers:
        return
    if (traces := watch_of(connection).traces) is not None:
        traces.has_key_locks = True
    if connection.vendor == "postgresql":
        with connection.cursor() as cursor:
            cursor.execute(_LOCK_POSTGRESQL, [numbers])
    else:
        for number in numbers:
            _lock_row(connection, number)


def _lock_number(topic: str, key: str) -> int:
    digest = hashlib.sha256(f"{topic}\x00{key}".encode()).digest()[:8]
    return int.from_bytes(digest, signed=True)


def _lock_row(connection: BaseDatabaseWrapper, number: int) -> None:
    """Lock the row of a key by an UPDATE.

    An UPDATE locks the row on every database, which SELECT FOR UPDATE does not. On SQLite, the UPDATE locks the whole
    database.
    """
    with connection.cursor() as cursor:
        cursor.execute(_LOCK_ROW, [number])
        if cursor.rowcount:
            return
        try:
            with transaction.atomic(using=connection.alias):
                cursor.execute(_ADD_ROW, [number])
        except IntegrityError:
            # Another transaction has added the row of this key and committed meanwhile.
            cursor.execute(_LOCK_ROW, [number])
