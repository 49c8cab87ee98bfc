"""The inbox: a handler's effects and the inbox row commit in one transaction, so the effects happen once.

The transaction writes the inbox row first. A second delivery of the same message waits at the unique key until the
transaction of the first delivery ends. If the first transaction has committed, the second delivery finds the row, and
outbox does not call the handler. If the first transaction was rolled back, outbox calls the handler for the second
delivery.

Where no pooler is in between, the statements of the inbox are prepared: planning them took 120 of the server's 265 µs
per message. A prepared plan serves 200 messages, because a plan that was made for an almost empty inbox reads the whole
table. If `prepare_threshold` is set, psycopg may deallocate the prepared statements of the connection, so the inbox
prepares none.

With Django's pool, a handler thread returns its connection after each call; otherwise the threads of the first
subscribers would keep all connections. Without a pool it keeps its connection, because a new session costs more than
most handlers. A serialisation failure or a deadlock is repeated in the same call, and does not cost the message an
attempt.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextvars import Context, copy_context
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final, cast
from uuid import UUID

from django.conf import settings
from django.db import InternalError, connections, router, transaction
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.utils import OperationalError
from psycopg import Connection, pq
from psycopg import Error as DriverError
from psycopg.errors import DivisionByZero, InvalidSqlStatementName

from outbox.broker.database.arrays import UUIDS
from outbox.broker.database.connection import is_ended
from outbox.broker.database.sender import RoundTrip, Row, note_backend, prepared_on, session_of
from outbox.broker.database.statement import INTEGER, TEXT, UUID_, Statement
from outbox.contrib.django.database.columns import read_uuid, stored_uuid
from outbox.contrib.django.database.database_errors import repeated
from outbox.contrib.django.database.django_internals import rollback_cause
from outbox.contrib.django.database.transactions import (
    BlockWatch,
    begun_by_hand,
    cause_of_rollback,
    close_with_blocks,
    entered_wrappers,
    in_pipeline,
    in_test_case,
    is_session_changed,
    is_watched,
    leave_wrappers,
    lost,
    sync_pipeline,
    watch_of,
)
from outbox.contrib.django.settings.conf import get_settings
from outbox.contrib.django.subscribers.registry import Subscriber, find_subscriber
from outbox.contrib.django.subscribers.shared_transaction import (
    LOCK_MILLISECONDS,
    STATEMENT_MILLISECONDS,
    Result,
    SharedTransaction,
)
from outbox.errors import (
    ConfigurationError,
    HandlerNotStarted,
    LeaseLost,
    PartialFailure,
    PermanentError,
    TransactionUsageError,
)
from outbox.message import Delivery, afresh
from outbox.ports import AnyHandler, Disposition, MoreCalls, call_handler
from outbox.subscription import Effects, Subscription, threads_of
from outbox.utils import fence
from outbox.utils.causes import causes
from outbox.utils.faults import point
from outbox.utils.safe_text import class_name, error_line, masked_names, masked_text, printable, show_as, shown_text

logger = logging.getLogger(__name__)


# -- the connections of handlers -------------------------------------------------------------------
#
# The code below manages the database connections of handler threads. Between two messages, a connection stays open, is
# returned to a pool, or is closed.
#
# Django closes connections at the end of a request, but a consumer has no requests.


# The size of a psycopg_pool.ConnectionPool without options (min_size=4, max_size=None).
_POOL_SIZE: Final = 4


class _Closing:
    """Closes its connections when Python deletes the object."""

    def __init__(self) -> None:
        self.connections: Sequence[BaseDatabaseWrapper] = ()

    def __del__(self) -> None:
        for connection in self.connections:
            with contextlib.suppress(Exception):
                connection.close()


class _OfThread(threading.local):
    """The connections of one handler thread.

    When the thread ends, Python deletes the `_Closing` object of the thread, and this deletion closes the connections.
    Without this class, the connections would stay open until the garbage collector finds them.
    """

    def __init__(self) -> None:
        self.closing = _Closing()
        # The aliases on which the caller of the present call, such as a test, has an atomic() block open.
        self.open_before: Collection[str] = ()
        # The ids (`id`) of the execute wrappers of the caller's blocks.
        self.wrappers_before: Collection[int] = ()


_of_thread = _OfThread()


def begin_call() -> None:
    """Replace the connections that have ended while this thread was idle, and return those of Django's pools.

    Whatever decodes a body may have taken one from a pool, and other threads would miss it while the handler runs.

    With DEBUG, also empty the query log, as Django does for each request.
    """
    open_before: list[str] = []
    wrappers_before: list[int] = []
    for connection in connections.all(initialized_only=True):
        if len(connection.execute_wrappers) > 1:
            wrappers_before += map(id, entered_wrappers(connection))
        raw = connection.connection
        if connection.in_atomic_block:
            open_before.append(connection.alias)
            continue
        # Otherwise each idle thread would notice the end of its session by a failed call, and each of these failures
        # would lengthen the pause of its subscription, long after the server is back.
        if raw is None:
            continue
        if _is_expired(connection) or _has_pool(connection) or (connection.vendor == "postgresql" and is_ended(raw)):
            connection.close()
    _of_thread.open_before = open_before
    _of_thread.wrappers_before = wrappers_before
    if settings.DEBUG:
        for connection in connections.all(initialized_only=True):
            # Inside CaptureQueriesContext, which is assertNumQueries too, a test reads the log.
            if not connection.force_debug_cursor:
                connection.queries_log.clear()


def _has_pool(connection: BaseDatabaseWrapper) -> bool:
    return bool(connection.settings_dict["OPTIONS"].get("pool"))


def _is_expired(connection: BaseDatabaseWrapper) -> bool:
    close_at = connection.close_at
    return close_at is not None and bool(connection.settings_dict["CONN_MAX_AGE"]) and time.monotonic() >= close_at


def _is_left_open(connection: BaseDatabaseWrapper) -> bool:
    """Whether the handler of this thread has left an atomic() block open on the connection."""
    is_of_caller = connection.alias in _of_thread.open_before or in_test_case(connection)
    return connection.in_atomic_block and not is_of_caller


def _left_open(what: str) -> str:
    return (
        f"{what} has left an atomic() block open, so the writes of its transaction were rolled back. Enter the block "
        "with `with`, and do not keep a generator that is inside it."
    )


def _end_wrapping(opened: Iterable[BaseDatabaseWrapper]) -> None:
    """Remove the execute wrappers that the handler of this thread has left, so that they watch no later message."""
    for connection in opened:
        # The watch of blocks is a wrapper, so one more is that of a block.
        if len(connection.execute_wrappers) > 1 and leave_wrappers(connection, _of_thread.wrappers_before):
            logger.error(
                "a handler on %r has left an execute_wrapper() block open, so its wrapper was removed. Enter the block "
                "with `with`, and do not keep a generator that is inside it.",
                connection.alias,
            )


def refresh_connections(*, in_handler: bool = False) -> None:
    """Return this thread's connections to Django's pool. Close connections that are broken or past CONN_MAX_AGE.

    Also close a connection on which a handler has left an atomic() block open: the blocks of the next messages would be
    inside it, and would never commit. Remove the execute wrappers of blocks that it has left open.

    Also close a connection whose session a handler has changed, so that the next message does not meet the setting.
    RESET ALL would not do: it would also undo what Django and the project set when the connection was opened. With
    `in_handler`, the handler that has changed the session goes on, so it keeps its connection.

    A pool may have fewer connections than there are threads, so a thread that keeps a connection would block another
    thread. Without a pool, connections with CONN_MAX_AGE = 0 are kept. Django's close_old_connections would close such
    connections, because 0 means "for one request", and a worker would reconnect for every message. A connection with
    CONN_MAX_AGE = 0 is closed when its thread ends.
    """
    opened = _of_thread.closing.connections = connections.all(initialized_only=True)
    if not in_handler:
        _end_wrapping(opened)
    for connection in opened:
        if connection.in_atomic_block:
            if not in_handler and _is_left_open(connection):
                logger.error("%s", _left_open(f"a handler on {connection.alias!r}"))
                close_with_blocks(connection)
            continue
        if connection.connection is None:
            continue
        has_pool = _has_pool(connection)
        # Without an error, only two cases have to be looked at here: a pool would lend a session that the server has
        # ended, and the next step of a handler would meet it. Otherwise `begin_call` looks before the next call.
        is_over = (has_pool or in_handler) and connection.vendor == "postgresql" and is_ended(connection.connection)
        broken = is_over or (connection.errors_occurred and not connection.is_usable())
        # True if a handler or its on_commit callback has executed BEGIN by hand. On such a connection, the transaction
        # of the next message could not begin. In a pipeline, its COMMIT would wait.
        left_open = begun_by_hand(connection) or in_pipeline(connection)
        changed = is_session_changed(connection) and (has_pool or not in_handler)
        if (changed or is_over) and has_pool:
            # The pool drops a connection that is closed.
            connection.connection.close()
        if broken or left_open or changed or has_pool or _is_expired(connection):
            connection.close()
        connection.errors_occurred = False


def end_session(connection: BaseDatabaseWrapper) -> None:
    """Close a connection on which the transaction of a message could not begin, so that the next attempt gets another.

    A handler may have made its session read-only, for example, by the driver's own connection. On SQLite, another
    writer is the cause, and a new connection would wait for it again.
    """
    if connection.in_atomic_block or connection.connection is None or connection.vendor == "sqlite":
        return
    if _has_pool(connection):
        # The pool drops a connection that is closed.
        connection.connection.close()
    connection.close()


# One lock per SQLite file. The threads of a process wait for each other at this lock. Without the lock, threads would
# fail with "database is locked".
_turns: Final[dict[str, threading.RLock]] = {}


@contextlib.contextmanager
def one_writer(connection: BaseDatabaseWrapper) -> Iterator[None]:
    """On SQLite, which allows one writer at a time, let the handlers of this process run one after the other.

    On other databases, do nothing. Without this lock, a handler that waits for other handlers longer than SQLite's
    `timeout` fails with "database is locked".
    """
    if connection.vendor != "sqlite":
        yield
        return
    with _turns.setdefault(str(connection.settings_dict["NAME"]), threading.RLock()):
        yield


def handler_alias(subscriber: Subscriber) -> str:
    """Return the alias of the database that has a subscriber's inbox, and on which the handler's transaction runs."""
    from outbox.contrib.django.models import InboxEntry

    return subscriber.using or router.db_for_write(InboxEntry)


def pool_shortages(subscribers: Iterable[Subscriber]) -> Iterator[str]:
    """Return a warning for each pool that has fewer connections than a consumer process has handler threads."""
    for alias, wanted in handler_sessions(subscribers).items():
        entry = connections[alias].settings_dict if alias in connections else None
        options = entry["OPTIONS"].get("pool") if entry is not None else None
        if not options:
            continue
        given: Mapping[str, Any] = options if isinstance(options, Mapping) else {}
        size = given.get("max_size") or given.get("min_size", _POOL_SIZE)
        if wanted > size:
            yield (
                f"the handlers of one consumer process have {wanted} threads on {alias!r}, but its connection pool has "
                f"only {size} connections. So {wanted - size} threads may wait for a connection, and after the pool's "
                f"timeout ({given.get('timeout', 30):g} s) their messages wait too. Set OUTBOX['HANDLER_THREADS'] = "
                f"{size} (and no threads=… above 8), or DATABASES[{alias!r}]['OPTIONS']['pool']['max_size'] = {wanted}."
            )


def handler_sessions(subscribers: Iterable[Subscriber]) -> dict[str, int]:
    """Return for each alias how many sessions the handlers of one consumer process may open."""
    found: dict[str, list[Subscription]] = {}
    for item in subscribers:
        found.setdefault(handler_alias(item), []).append(item.subscription)
    every = [one for sharing in found.values() for one in sharing]
    most = threads_of(every, get_settings().handler_threads)
    # A thread may go on to a handler of another alias, and then it has a session of both.
    return {alias: min(most, sum(one.threads for one in sharing)) for alias, sharing in found.items()}


# -- a transaction with few round trips ------------------------------------------------------------
#
# Django sends BEGIN, every statement and COMMIT one by one. On PostgreSQL, a `ShortTransaction` sends BEGIN together
# with the first statement, which writes the inbox row, and COMMIT together with the last one, which checks the row. If
# the check fails, the server does not execute COMMIT. If it succeeds, Django then runs the on_commit callbacks and ends
# its atomic block. Where `is_possible` is false, the inbox executes its statements through Django.
#
# For a single message, planning a statement costs the server more than executing it, so the statements are prepared if
# no pooler is between the connection and the server. See decision 201.


_BEGIN: Final = Statement("BEGIN")
_COMMIT: Final = Statement("COMMIT")
_ROLLBACK: Final = Statement("ROLLBACK")
_SESSION: Final = Statement("SELECT pg_backend_pid(), current_setting('transaction_isolation')")

# These statements use no table of the broker's schema.
_NO_SCHEMA: Final = "public"
# After this number of messages, the prepared plans are discarded: a plan made for a nearly empty inbox would later read
# the whole table.
_PLANS_LAST: Final = 200


class ShortTransaction:
    """The statements before and after one handler call, in the outermost atomic block of the connection."""

    def __init__(self, connection: BaseDatabaseWrapper) -> None:
        self._connection = connection
        self._raw: Connection = connection.connection
        self._session = session_of(self._raw)
        self._trip = RoundTrip(self._raw, _NO_SCHEMA)

    @staticmethod
    def is_possible(connection: BaseDatabaseWrapper, watch: BlockWatch) -> bool:
        """Whether the entered block is the outermost block and has default options, and no other code than `watch`
        watches its statements."""
        raw = connection.connection
        return (
            isinstance(raw, Connection)
            and len(connection.atomic_blocks) == 1
            and not is_watched(connection, watch)
            and (raw.isolation_level, raw.read_only, raw.deferrable) == (None, None, None)
            and _status(raw) == pq.TransactionStatus.IDLE
        )

    def begin(self, statement: Statement, values: Mapping[str, Any], *, prepare: bool) -> list[Row]:
        """Begin the transaction with this statement, and return the statement's rows.

        `prepare`: prepare the statement if the connection allows it. Django does not see the BEGIN.
        """
        with self._connection.wrap_database_errors:
            try:
                return self._begin(statement, values, prepare)
            except InvalidSqlStatementName:
                self._prepare_no_more()
                if _status(self._raw) == pq.TransactionStatus.INERROR:
                    self._trip.send(_ROLLBACK)
                return self._begin(statement, values, prepare)

    def _begin(self, statement: Statement, values: Mapping[str, Any], prepare: bool) -> list[Row]:
        session = self._session
        is_known = session.is_read_committed is not None
        if is_known and prepare and (prepared := prepared_on(self._raw)) is not None:
            self._trip = RoundTrip(self._raw, _NO_SCHEMA, prepared=prepared)
            session.handled_messages += 1
            if session.handled_messages % _PLANS_LAST == 0:
                self._trip.discard_prepared()
        self._trip.send(_BEGIN)
        if not is_known:
            self._trip.send(_SESSION)
        self._trip.send(statement, values)
        *_, before, rows = self._trip.finish()
        if not is_known:
            [(pid, isolation)] = before
            note_backend(self._raw, int(pid))
            session.is_read_committed = isolation == b"read committed"
        return rows

    @property
    def can_share(self) -> bool:
        """Whether the begun transaction may have the effects of several handler calls."""
        return bool(self._session.is_read_committed)

    def savepoint(self, number: int, statement: Statement, values: Mapping[str, Any]) -> list[Row]:
        """Set a savepoint, then execute a statement, and return the statement's rows."""
        with self._connection.wrap_database_errors:
            self._trip.send(_savepoint("SAVEPOINT", number))
            self._trip.send(statement, values)
            _, rows = self._trip.finish()
        return rows

    def roll_back_to(self, number: int) -> None:
        """Undo everything that the transaction has done after a savepoint.

        Raises a database error if the savepoint does not exist any more.
        """
        with self._connection.wrap_database_errors:
            self._trip.send(_savepoint("ROLLBACK TO SAVEPOINT", number))
            self._trip.finish()

    def _prepare_no_more(self) -> None:
        """Stop preparing statements: the application has deallocated them (DEALLOCATE ALL), and may do so again."""
        self._session.prepared = None
        self._trip = RoundTrip(self._raw, _NO_SCHEMA)

    def is_whole(self) -> bool:
        """Whether the transaction can still commit, as far as the client knows."""
        return _status(self._connection.connection) == pq.TransactionStatus.INTRANS

    def commit(self, check: Statement | None, values: Mapping[str, Any]) -> bool:
        """Run `check` and commit. If the check fails (with a division by zero), commit nothing and return False."""
        with self._connection.wrap_database_errors:
            if check is not None:
                self._trip.send(check, values)
            self._trip.send(_COMMIT)
            answered, error = self._trip.finish_all()
            if error is not None:
                if isinstance(error, DivisionByZero) and not answered:
                    return False
                if isinstance(error, InvalidSqlStatementName):
                    self._prepare_no_more()
                raise error
        return True


@functools.cache
def _savepoint(command: str, number: int) -> Statement:
    # Each savepoint of a transaction has a name of its own. If all savepoints had the same name and the newest
    # savepoint were missing, ROLLBACK TO would find an earlier savepoint, and would also undo the work of earlier
    # handlers.
    return Statement(f"{command} outbox_{number}")


def _status(raw: Connection) -> int | None:
    """The transaction status; None in a psycopg pipeline, whose statements the server may not have executed yet."""
    pgconn = raw.pgconn
    return None if pgconn.pipeline_status else pgconn.transaction_status


# -- rows of the inbox -----------------------------------------------------------------------------


# The text of the statement is the same on a connection of Django and in a ShortTransaction. The statement sets the
# timeouts before its first wait. The timeouts apply to this transaction only, so they are safe behind a pooler. The
# timeouts are needed because a handler that does not continue must not block the next owner of its queue.
_ENTER: Final = """
INSERT INTO outbox_inbox (consumer_group, generation, message_id)
SELECT %(group)s, %(generation)s::integer, {ids}
WHERE set_config('lock_timeout', %(lock)s, true) IS NOT NULL
  AND set_config('idle_in_transaction_session_timeout', %(idle)s, true) IS NOT NULL
ON CONFLICT DO NOTHING
RETURNING message_id
"""
_KEY_TYPES: Final = {"group": TEXT, "generation": INTEGER}
_ONE_TYPES: Final = {**_KEY_TYPES, "lock": TEXT, "idle": TEXT, "message_ids": UUID_}
# PostgreSQL plans the statement for one message faster than the statement for a batch. The ids of a batch are sorted,
# so two batches cannot deadlock.
_ENTER_ONE: Final = Statement(_ENTER.format(ids="%(message_ids)s::uuid"), _ONE_TYPES)
_ENTER_ALL: Final = Statement(
    _ENTER.format(ids="unnest(%(message_ids)s::uuid[])"), {**_ONE_TYPES, "message_ids": UUIDS}, (UUID_,)
)
# The statement of a message that joins a transaction. A shorter statement_timeout of the project stays.
_LIMIT: Final = f"""AND set_config('statement_timeout', CASE
    WHEN current_setting('statement_timeout')::interval BETWEEN '1ms' AND '{STATEMENT_MILLISECONDS}ms'
    THEN current_setting('statement_timeout') ELSE '{STATEMENT_MILLISECONDS}ms' END, true) IS NOT NULL
ON CONFLICT"""
_JOIN: Final = Statement(_ENTER_ONE.text.replace("ON CONFLICT", _LIMIT), _ONE_TYPES)
# These statements divide by zero, and so fail, if a row is missing.
_IS_THERE: Final = Statement(
    """
SELECT 1 / count(*) FROM outbox_inbox
WHERE consumer_group = %(group)s AND generation = %(generation)s::integer AND message_id = %(message_id)s::uuid
""",
    {**_KEY_TYPES, "message_id": UUID_},
)
_ALL_THERE: Final = Statement(
    """
SELECT 1 / (count(*) = %(count)s::integer)::integer FROM outbox_inbox
WHERE consumer_group = %(group)s AND generation = %(generation)s::integer AND message_id = ANY (%(message_ids)s::uuid[])
""",
    {**_KEY_TYPES, "count": INTEGER, "message_ids": UUIDS},
)

# Not INSERT OR IGNORE, which also ignores an error of another constraint: the message would be skipped as handled.
_INSERT_SQLITE: Final = """
INSERT INTO outbox_inbox (consumer_group, generation, message_id) VALUES (%s, %s, %s) ON CONFLICT DO NOTHING
"""
# A second delivery waits at the row of the first one for this number of seconds. The rows are sorted, so two batches
# cannot deadlock. RETURNING has only the rows that are new.
_ENTER_MARIADB: Final = """
SET STATEMENT innodb_lock_wait_timeout = %s FOR
INSERT IGNORE INTO outbox_inbox (consumer_group, generation, message_id) VALUES {rows} RETURNING message_id
"""

_SELECT: Final = "SELECT message_id FROM outbox_inbox WHERE consumer_group = %s AND generation = %s AND message_id"

_NEXT_GENERATION: Final = "SELECT min(generation) FROM outbox_inbox WHERE consumer_group = %s AND generation > %s"

# A list of this length is below the parameter limit of every database that Django supports.
_LARGEST_LIST: Final = 500

_DELETE: Final = """
DELETE FROM outbox_inbox WHERE consumer_group = %s AND generation = %s AND message_id = %s
"""


def unsupported(connection: BaseDatabaseWrapper) -> ConfigurationError:
    return ConfigurationError(
        f"the database {connection.alias!r} is {connection.vendor!r}, for which outbox has no inbox. Give the "
        "subscriber the alias of a database with PostgreSQL, MariaDB or SQLite: @subscriber(…, using=…)."
    )


class InboxEntries:
    """The inbox rows of one consumer group and generation, on the connection of its handlers."""

    def __init__(self, connection: BaseDatabaseWrapper, group: str, generation: int) -> None:
        self._connection = connection
        # The number of atomic blocks around that of the handler.
        self._outer_blocks = len(connection.atomic_blocks)
        self._key: list[Any] = [group, generation]
        self._short: ShortTransaction | None = None
        # The driver's connection on which COMMIT is executed.
        self._raw: Any = None
        # The limit of idle_in_transaction_session_timeout for this transaction, in milliseconds.
        self._idle = ""
        # True as soon as no work remains except COMMIT. If the call fails while this is True, the error occurred in
        # COMMIT or after COMMIT.
        self.commit_is_next = False

    def enter(
        self, deliveries: Sequence[Delivery], *, lease_seconds: float, timeout_seconds: float = math.inf
    ) -> list[Delivery]:
        """Write the inbox rows in the open transaction, and return the deliveries whose rows are new.

        The server ends the transaction if it is idle for four fifths of the lease or for `timeout_seconds`.

        A batch may contain a message twice, for example if the topic's queue and the retry queue both deliver it. Only
        the first delivery is handled.
        """
        lock_seconds, idle_seconds = 0.5 * lease_seconds, min(0.8 * lease_seconds, timeout_seconds)
        is_postgres = self._connection.vendor == "postgresql"
        if is_postgres and len(deliveries) == 1:
            message_id = deliveries[0].message.message_id
            is_new = self._insert(_ENTER_ONE, message_id, lock_seconds, idle_seconds) and not self._later([message_id])
            return list(deliveries) if is_new else []
        firsts: dict[UUID, Delivery] = {}
        for delivery in deliveries:
            firsts.setdefault(delivery.message_id, delivery)
        if is_postgres:
            new = {row[0] for row in self._insert(_ENTER_ALL, sorted(firsts), lock_seconds, idle_seconds)}
        elif self._connection.vendor == "mysql":
            new = self._enter_on_mariadb(sorted(firsts), lock_seconds)
        elif self._connection.vendor == "sqlite":
            new = self._enter_on_sqlite(sorted(firsts))
        else:
            raise unsupported(self._connection)
        new -= self._later(new)
        return [delivery for message_id, delivery in firsts.items() if message_id in new]

    def _insert(self, statement: Statement, message_ids: Any, lock_seconds: float, idle_seconds: float) -> list[Row]:
        """Write inbox rows, together with BEGIN if that is possible, and return a row for each new one."""
        connection = self._connection
        group, generation = self._key
        lock, idle = str(max(1, round(lock_seconds * 1000))), str(max(1, round(idle_seconds * 1000)))
        values = {"group": group, "generation": generation, "lock": lock, "idle": idle, "message_ids": message_ids}
        watch = watch_of(connection)
        if ShortTransaction.is_possible(connection, watch):
            # The watch of the connection does not see this BEGIN, so report the BEGIN to the watch. Otherwise the watch
            # would assume that the transaction does not belong to the block.
            watch.is_begun = True
            self._short = ShortTransaction(connection)
            self._idle = idle
            return self._short.begin(statement, values, prepare=statement is _ENTER_ONE)
        with connection.cursor() as cursor:
            cursor.execute(statement.text, values)
            return cast("list[Row]", cursor.fetchall())

    def _later(self, message_ids: Collection[UUID]) -> set[UUID]:
        group, generation = self._key
        return handled_later(self._connection, group, generation, message_ids)

    def _enter_on_mariadb(self, message_ids: Sequence[UUID], lock_seconds: float) -> set[UUID]:
        parameters: list[Any] = [max(1, round(lock_seconds))]
        for message_id in message_ids:
            parameters += [*self._key, stored_uuid(self._connection, message_id)]
        rows = ", ".join(["(%s, %s, %s)"] * len(message_ids))
        with self._connection.cursor() as cursor:
            cursor.execute(_ENTER_MARIADB.format(rows=rows), parameters)
            return {read_uuid(value) for (value,) in cursor.fetchall()}

    def _enter_on_sqlite(self, message_ids: Sequence[UUID]) -> set[UUID]:
        new = set()
        with self._connection.cursor() as cursor:
            for message_id in message_ids:
                cursor.execute(_INSERT_SQLITE, [*self._key, stored_uuid(self._connection, message_id)])
                if cursor.rowcount == 1:
                    new.add(message_id)
        return new

    @property
    def can_share(self) -> bool:
        """Whether further messages may join the transaction."""
        return self._short is not None and self._short.can_share

    def join(self, number: int, delivery: Delivery) -> bool:
        """Set savepoint `number` and write the inbox row of a delivery. Return whether the row is new."""
        assert self._short is not None
        group, generation = self._key
        lock, message_id = str(LOCK_MILLISECONDS), delivery.message.message_id
        values = {"group": group, "generation": generation, "lock": lock, "idle": self._idle, "message_ids": message_id}
        return bool(self._short.savepoint(number, _JOIN, values)) and not self._later([message_id])

    def is_whole(self) -> bool:
        """Whether the shared transaction can still commit, as far as the client knows."""
        return self._short is not None and self._short.is_whole()

    def roll_back_to(self, number: int) -> None:
        """Undo everything that the transaction has done after savepoint `number`."""
        assert self._short is not None
        self._short.roll_back_to(number)

    def remove(self, message_ids: Iterable[UUID]) -> None:
        """Remove the inbox rows of messages whose effects the handler has undone."""
        rows = [[*self._key, stored_uuid(self._connection, value)] for value in sorted(message_ids)]
        if rows:
            with self._connection.cursor() as cursor:
                cursor.executemany(_DELETE, rows)

    def confirm(self, deliveries: Sequence[Delivery], name: str) -> None:
        """Verify, with the last statement of the transaction, that the transaction still has the inbox rows.

        If the transaction still has the rows, it also has the effects of the handler. In a ShortTransaction, the
        function checks the rows and commits in one request, which saves a round trip. If the rows are missing, the
        function raises TransactionUsageError, because COMMIT would succeed and store nothing.
        """
        if len(self._connection.atomic_blocks) > self._outer_blocks + 1:
            # Django would leave the inner block, and not commit.
            raise TransactionUsageError(_left_open(name))
        self._refuse_unfinished(name)
        self._raw = self._connection.connection
        if self._connection.needs_rollback:
            raise TransactionUsageError(
                f"{name} raised no error, but its transaction was marked for rollback or its connection was closed"
                f"{cause_of_rollback(self._connection)}. So the message has failed. Raise the error that caused the "
                "rollback."
            ) from rollback_cause(self._connection)
        gone = "a ROLLBACK was executed in this transaction, so the transaction has lost its inbox row"
        if self._short is not None and self.is_whole():
            if is_ended(self._raw):
                # COMMIT is not sent, so the attempt has failed. As one that may have committed, it would have no limit.
                raise OperationalError(
                    f"the server has ended the session of {name} before COMMIT, and has rolled its effects back. If "
                    "the handler executed no statement for longer than four fifths of OUTBOX['LEASE_SECONDS'], declare "
                    "it with @subscriber(…, effects='outside'), which runs it without a transaction."
                )
            self.commit_is_next = True
            if not self._commit(self._short, deliveries):
                self.commit_is_next = False
                raise lost(self._connection, name, gone)
            return
        try:
            sync_pipeline(self._connection)
            found = self._present(deliveries)
        except (InternalError, DriverError) as error:
            raise lost(self._connection, name, str(error).strip()) from error
        if len(found) < len(deliveries):
            raise lost(self._connection, name, gone)
        self.commit_is_next = True

    def _refuse_unfinished(self, name: str) -> None:
        """Raise TransactionUsageError if the handler has left something open that would be lost after COMMIT."""
        for other in connections.all(initialized_only=True):
            if other is not self._connection and _is_left_open(other):
                raise TransactionUsageError(_left_open(f"{name} on {other.alias!r}"))
        if in_pipeline(self._connection):
            raise TransactionUsageError(
                f"{name} has left a psycopg pipeline open, in which COMMIT would wait. Enter the pipeline with `with`."
            )

    def _commit(self, short: ShortTransaction, deliveries: Sequence[Delivery]) -> bool:
        if not deliveries:
            return short.commit(None, {})
        group, generation = self._key
        values: dict[str, Any] = {"group": group, "generation": generation}
        if len(deliveries) == 1:
            return short.commit(_IS_THERE, {**values, "message_id": deliveries[0].message.message_id})
        ids = [delivery.message.message_id for delivery in deliveries]
        return short.commit(_ALL_THERE, {**values, "count": len(ids), "message_ids": ids})

    @property
    def is_in_doubt(self) -> bool:
        """Whether COMMIT was sent, and the connection has ended without its answer: the server may still commit."""
        # After an error, Django replaces a connection that has ended.
        return self.commit_is_next and self._connection.connection is not self._raw

    def still_there(self, deliveries: Sequence[Delivery]) -> set[UUID]:
        """Return the messages whose rows are committed although the attempt failed, because the handler ran COMMIT."""
        if self._connection.in_atomic_block and not self._outer_blocks:
            # A block that the handler has left open keeps the transaction open, with the inbox rows in it.
            close_with_blocks(self._connection)
        if not deliveries or fence.is_lost():
            # Either no inbox rows were written, or another owner of the queue may have written them.
            return set()
        try:
            return self._present(deliveries)
        except Exception as error:
            logger.info("the inbox on %r cannot be read after a failure: %s", self._connection.alias, shown_text(error))
            return set()

    def _present(self, deliveries: Sequence[Delivery]) -> set[UUID]:
        if not deliveries:
            return set()
        stored = [stored_uuid(self._connection, delivery.message_id) for delivery in deliveries]
        if self._connection.vendor == "postgresql":
            statement, parameters = f"{_SELECT} = ANY (%s)", [*self._key, stored]
        else:
            statement, parameters = f"{_SELECT} IN ({', '.join(['%s'] * len(stored))})", [*self._key, *stored]
        with self._connection.cursor() as cursor:
            cursor.execute(statement, parameters)
            return {read_uuid(value) for (value,) in cursor.fetchall()}


def handled(connection: BaseDatabaseWrapper, group: str, message_ids: Sequence[UUID], *, after: int = 0) -> set[UUID]:
    """Return those of `message_ids` for which the group's inbox has a row in any generation greater than `after`."""
    found: set[UUID] = set()
    generation = _next_generation(connection, group, after) if message_ids else None
    while generation is not None:
        for start in range(0, len(message_ids), _LARGEST_LIST):
            part = [stored_uuid(connection, value) for value in message_ids[start : start + _LARGEST_LIST]]
            places = ", ".join(["%s"] * len(part))
            with connection.cursor() as cursor:
                cursor.execute(f"{_SELECT} IN ({places})", [group, generation, *part])
                found.update(read_uuid(value) for (value,) in cursor.fetchall())
        generation = _next_generation(connection, group, generation)
    return found


# (alias, group) -> the generation for which this process has looked last, when (time.monotonic), and whether the inbox
# has rows of a later generation.
_looks: Final[dict[tuple[str, str], tuple[int, float, bool]]] = {}
_LOOK_SECONDS: Final = 1.0


def look_for_later(connection: BaseDatabaseWrapper, group: str, generation: int) -> None:
    """Find out whether the inbox has rows of a later generation, unless this process has looked within a second.

    The broker has such a generation no more if it was restored to before a reset, which takes longer than a second. A
    call looks before its transaction begins: in MariaDB, a SELECT inside of a REPEATABLE READ transaction would fix
    what its handler sees.
    """
    look = _looks.get((connection.alias, group))
    if look is None or look[0] != generation or time.monotonic() - look[1] > _LOOK_SECONDS:
        has_later = _next_generation(connection, group, generation) is not None
        _looks[connection.alias, group] = generation, time.monotonic(), has_later


def handled_later(
    connection: BaseDatabaseWrapper, group: str, generation: int, message_ids: Collection[UUID]
) -> set[UUID]:
    """Return those of `message_ids` that the group has handled in a later generation (`look_for_later`)."""
    look = _looks.get((connection.alias, group))
    if look is None or look[0] != generation or not look[2]:
        return set()
    return handled(connection, group, list(message_ids), after=generation)


def _next_generation(connection: BaseDatabaseWrapper, group: str, after: int) -> int | None:
    with connection.cursor() as cursor:
        cursor.execute(_NEXT_GENERATION, [group, after])
        found: int | None = cursor.fetchone()[0]
        return found


# -- calling a handler -----------------------------------------------------------------------------

# A test outbox learns the results of handler calls from this function, which runs on the thread of the call.
results_listener: Callable[[Subscription, AnyHandler, Sequence[Delivery], Sequence[object]], None] | None = None


class InboxInvoker:
    """Calls Django handlers (ports.Invoker).

    The class adds transaction, inbox row and timeouts to each call, and replaces broken connections.
    `has_generations`: a reset raises the generation of a group, and a restore of the broker may take a reset back.
    """

    def __init__(
        self,
        *,
        lease_seconds: float = 10.0,
        masked_fields: Mapping[str, frozenset[str]] = MappingProxyType({}),
        has_generations: bool = False,
    ) -> None:
        self._lease_seconds = lease_seconds
        self._has_generations = has_generations
        self._masked_fields = masked_fields

    def __call__(
        self, subscription: Subscription, handler: AnyHandler, deliveries: Sequence[Delivery], *, generation: int
    ) -> Sequence[Disposition | Exception]:
        results = self._results(subscription, handler, deliveries, generation, None, [])
        if self._masked_fields or results_listener is not None:
            self._conclude(subscription, handler, deliveries, results)
        return cast(Sequence[Disposition | Exception], results)

    def share(
        self, subscription: Subscription, handler: AnyHandler, delivery: Delivery, more: MoreCalls, *, generation: int
    ) -> Sequence[Result]:
        """Call the handler for a delivery and for the deliveries that join its transaction (ports.SharingInvoker)."""
        joined: list[Delivery] = []
        results = self._results(subscription, handler, [delivery], generation, more, joined)
        if self._masked_fields or results_listener is not None:
            self._conclude(subscription, handler, [delivery, *joined], results)
        return results

    def _conclude(
        self,
        subscription: Subscription,
        handler: AnyHandler,
        deliveries: Sequence[Delivery],
        results: Sequence[object],
    ) -> None:
        """Mask the errors of a call, and tell its results to the listener."""
        if self._masked_fields:
            self._mask(subscription, deliveries, results)
        if results_listener is not None:
            results_listener(subscription, handler, deliveries, results)

    def _mask(self, subscription: Subscription, deliveries: Sequence[Delivery], results: Sequence[object]) -> None:
        """Remove the values of masked fields from the errors."""
        errors = {id(one): one for one in results if isinstance(one, Exception)}
        if errors and (names := masked_names(self._masked_fields, subscription.topic)):
            contents = [content for one in deliveries for content in _contents(one)]
            for error in errors.values():
                try:
                    text = masked_text(shown_text(error), contents, names)
                except Exception as further:
                    # The handler may have put any object into the body.
                    text = f"its text is not shown, because masking it failed with {class_name(further)}"
                show_as(error, text)

    def _results(
        self,
        subscription: Subscription,
        handler: AnyHandler,
        deliveries: Sequence[Delivery],
        generation: int,
        more: MoreCalls | None,
        joined: list[Delivery],
    ) -> Sequence[Result]:
        registered = find_subscriber(subscription)
        begin_call()
        try:
            if registered is None or not registered.idempotent:
                if more is not None:
                    more.end_sharing("the handler has no inbox, so it has no transaction")
                results = call_handler(subscription, handler, deliveries, generation=generation)
                if any(map(_is_left_open, connections.all(initialized_only=True))):
                    raise TransactionUsageError(_left_open(f"the handler of group {subscription.group!r}"))
                return results
            connection = connections[handler_alias(registered)]
            call = _Call(
                connection,
                registered.name,
                subscription,
                handler,
                deliveries,
                generation,
                self._lease_seconds,
                self._has_generations,
                more,
                joined,
            )
            if connection.vendor != "sqlite":
                return repeated(call.attempt, registered.name)
            with one_writer(connection):
                return repeated(call.attempt, registered.name)
        except Exception as error:
            return [error] * len(deliveries)
        finally:
            refresh_connections()


def _contents(delivery: Delivery) -> list[object]:
    """Return the headers and the body of a delivery, and its body before the handler has changed it.

    A body that cannot be read or decoded is left out.
    """
    contents: list[object] = [delivery.headers]
    for again in (False, True):
        try:
            contents.append((afresh([delivery])[0] if again else delivery).body)
        except Exception as error:
            logger.info(
                "the body of message %s cannot be read, to mask an error: %s", delivery.message_id, class_name(error)
            )
    return contents


@dataclass(slots=True)
class _Call:
    """One call of a handler with the inbox. `joined`: the messages that have joined the call's transaction."""

    connection: BaseDatabaseWrapper
    name: str
    subscription: Subscription
    handler: AnyHandler
    deliveries: Sequence[Delivery]
    generation: int
    lease_seconds: float
    has_generations: bool
    more: MoreCalls | None
    joined: list[Delivery]
    # The context variables before the handler changes them.
    _clean: Context = field(default_factory=copy_context)
    _has_run: bool = False

    def attempt(self) -> Sequence[Result]:
        """Run the transaction. Return a result for each message of the call and for each message that has joined.

        When another transaction has stopped the transaction, `attempt` is called again. What the handler has changed in
        its delivery, in context variables or in the session must not reach the second call.
        """
        if not self._has_run:
            self._has_run = True
            return self._run()
        return self._clean.copy().run(self._run_again)

    def _run_again(self) -> Sequence[Result]:
        fence.rolled_back()
        refresh_connections()
        self.deliveries = afresh(self.deliveries)
        return self._run()

    def _run(self) -> Sequence[Result]:
        name, connection = self.name, self.connection
        inbox = InboxEntries(connection, self.subscription.group, self.generation)
        fresh: list[Delivery] | None = None
        failed: dict[UUID, Exception] = {}
        shared: SharedTransaction | None = None
        try:
            if self.has_generations:
                look_for_later(connection, self.subscription.group, self.generation)
            with transaction.atomic(using=connection.alias):
                entered = inbox.enter(
                    self.deliveries,
                    lease_seconds=self.lease_seconds,
                    # After this time, the consumer delivers the messages again, and they must not wait for this row.
                    timeout_seconds=self.subscription.timeout_seconds,
                )
                watch_of(connection).bind(name)
                if self.more is not None and inbox.can_share:
                    shared = SharedTransaction(connection, inbox, self.more, name, self.joined, self._clean)
                fresh = entered
                failed = _handle(self.subscription, self.handler, fresh)
                if failed:
                    inbox.remove(failed)
                if shared is not None:
                    shared.extend(functools.partial(self._handle_joined, inbox))
                point("consumer.before_inbox_commit")
                fence.check()
                whole = [item for item in fresh if item.message_id not in failed] if failed else fresh
                inbox.confirm(whole if shared is None else [*whole, *shared.handled], name)
                if shared is not None:
                    shared.take_callbacks()
        except BaseException as error:
            # Also SystemExit and CancelledError: what a handler committed by hand before them is not handled.
            # No inbox row was written: no attempt. The row is gone again: a failed attempt, or an unanswered COMMIT.
            # The row is there although COMMIT was not next: the handler has committed by hand. Otherwise: handled.
            if fresh is None:
                end_session(connection)
                raise _not_started(name, connection.alias, error) from error
            if shared is not None and self.joined:
                return shared.results_after_failure(fresh, error, functools.partial(error_after_commit, name))
            is_in_doubt = inbox.is_in_doubt
            stayed = inbox.still_there(fresh)
            if not stayed:
                if is_in_doubt:
                    raise commit_in_doubt(name, error) from error
                _name_idle_limit(name, error)
                raise
            if not inbox.commit_is_next:
                after = error_after_commit(name, error)
                return cast("list[Result]", [after if d.message_id in stayed else error for d in self.deliveries])
            # The error came from an on_commit callback, or from a COMMIT that succeeded and then raised an exception.
            logger.error(
                "%s has committed, so the handler is not called again after this error", name, exc_info=printable(error)
            )
        point("consumer.after_inbox_commit")
        results: list[Result]
        if not failed and len(fresh) == len(self.deliveries):
            results = [Disposition.HANDLED] * len(fresh)
        else:
            called = set(map(id, fresh))
            results = [_result(delivery, id(delivery) in called, failed) for delivery in self.deliveries]
        if shared is None:
            return results
        shared.run_callbacks()
        return [*results, *shared.results]

    def _handle_joined(self, inbox: InboxEntries, delivery: Delivery) -> Exception | None:
        _end_wrapping(connections.all(initialized_only=True))
        failed = _handle(self.subscription, self.handler, [delivery])
        if failed:
            inbox.remove(failed)
        return failed.get(delivery.message_id) if failed else None


def _handle(subscription: Subscription, handler: AnyHandler, deliveries: Sequence[Delivery]) -> dict[UUID, Exception]:
    """Run the handler, and return the failures of a PartialFailure. Any other exception rolls the whole batch back."""
    if not deliveries:
        return {}
    try:
        handler(deliveries if subscription.batch > 1 else deliveries[0])  # type: ignore[arg-type]
    except PartialFailure as partial:
        return {
            delivery.message_id: error
            for delivery in deliveries
            if (error := partial.error_of(delivery.message_id)) is not None
        }
    return {}


def _not_started(name: str, alias: str, error: BaseException) -> HandlerNotStarted:
    return HandlerNotStarted(
        f"{name} was not called, because its transaction on {alias!r} could not begin: {error_line(error)}. "
        f"The call does not count as an attempt. The messages wait until a transaction on "
        f"{alias!r} can begin."
    )


# PostgreSQL: idle_in_transaction_session_timeout.
_IDLE_LIMIT: Final = "25P03"


def _name_idle_limit(name: str, error: BaseException) -> None:
    """If the server ended an idle transaction, add the reason and the remedy to the text of the error."""
    with contextlib.suppress(Exception):
        # The attributes of a handler's error may raise. No error of a database does so.
        if not any(getattr(one, "sqlstate", None) == _IDLE_LIMIT for one in causes(error)):
            return
        error.args = (
            f"{shown_text(error)}. The transaction of {name} executed no statement for longer than four fifths of "
            "OUTBOX['LEASE_SECONDS'], so the server ended it and rolled its effects back. If the handler waits for "
            "another system, declare it with @subscriber(…, effects='outside'), which runs it without a transaction.",
        )


def error_after_commit(name: str, error: BaseException) -> PermanentError:
    """Return the error of an attempt that has committed by hand and then failed."""
    failure = PermanentError(
        f"{name} ended its transaction by hand (COMMIT) and then failed: {error_line(error)}. The "
        "committed effects and the inbox row of the message stay, so outbox will not call the handler again for this "
        "message: complete the missing effects by hand. Remove the COMMIT from the handler; outbox commits."
    )
    failure.__cause__ = error
    return failure


def commit_in_doubt(name: str, error: BaseException) -> LeaseLost:
    """Return the error of an attempt of which only the next attempt can find out whether it has committed.

    The next attempt waits at the inbox row. If this error counted as a failed attempt, a message whose effects are
    stored could be a dead letter.
    """
    return LeaseLost(
        f"{name}: the database did not answer the COMMIT, so the message is tried again: {error_line(error)}"
    )


def _result(delivery: Delivery, called: bool, failed: dict[UUID, Exception]) -> Result:
    if delivery.message_id in failed:
        return failed[delivery.message_id]
    return Disposition.HANDLED if called else Disposition.SKIPPED


def require_inboxes(subscriptions: Iterable[Subscription]) -> None:
    """Raise ConfigurationError if the inbox table of a handler is missing, or its tables of claims and steps.

    Without its tables, every message of this handler would fail.

    If a database cannot be reached, the worker continues. Messages whose handlers need this database are tried again.
    """
    from outbox.contrib.django.models import ClaimEntry, InboxEntry, StepEntry

    needed: dict[str, set[str]] = {}
    for item in filter(None, map(find_subscriber, subscriptions)):
        if item.idempotent:
            models = (
                (InboxEntry,) if item.subscription.effects is Effects.INSIDE else (InboxEntry, ClaimEntry, StepEntry)
            )
            needed.setdefault(handler_alias(item), set()).update(model._meta.db_table for model in models)
    for alias, tables in sorted(needed.items()):
        try:
            found = connections[alias].introspection.table_names()
        except OperationalError as error:
            logger.warning("the worker could not find out whether %r has an inbox: %s", alias, error)
            continue
        for table in sorted(tables - set(found)):
            raise ConfigurationError(
                f"the table {table!r} is missing on {alias!r}, so handlers with the inbox cannot run: run `manage.py "
                f"migrate --database={alias}`. Nothing was consumed."
            )
