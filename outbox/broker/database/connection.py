"""The address of a broker's database, connections with deadlines, and a pool of such connections.

A new connection compares `pg_backend_pid()` with the process id that it got when it connected: a pooler sends another
one. If `LISTEN_URL` is set, each other URL leads to a pooler. Behind a pooler a connection prepares no statement,
because an old PgBouncer gives the session with its statements to the next client; it does not LISTEN, and sets nothing.
"""

from __future__ import annotations

import contextlib
import os
import re
import select
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final, Self, TypeAlias, TypeVar

import psycopg
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from psycopg.pq import TransactionStatus
from psycopg.rows import TupleRow

from outbox.broker.database.psycopg_internals import PQGen
from outbox.broker.database.statement import check_schema_name
from outbox.errors import BrokerUnavailable, ConfigurationError, UsageError
from outbox.utils.refused_connections import is_refused
from outbox.utils.safe_text import MASK

# -- connection strings ----------------------------------------------------------------------------

_REMEDY: Final = (
    # The last @ of a text ends what `mask_passwords` hides, so the URL comes last.
    "in user and password, write %40 for @, %2F for / and %3A for :, as in "
    "postgresql://user:password@host:5432/database."
)
_SECRET: Final = re.compile(r"password|secret|scram_.*_key")
# libpq's errors quote parts of the connection string, and such a part may belong to the password.
_QUOTED: Final = re.compile(r'".*"', re.DOTALL)
# The part of a URL that libpq reads as the user, and then the part that libpq reads as hosts and database.
_URL: Final = re.compile(r"postgres(?:ql)?://(?:[^@/]*@)?([^?]*)")


def read_conninfo(text: str, what: str) -> dict[str, Any]:
    """Return the parameters of a connection string or URL. Raises ConfigurationError, which begins with `what`.

    libpq would read a part of a password with an unescaped @ or / as host, port or database, and show it in an error.
    """
    try:
        found = conninfo_to_dict(text)
    except psycopg.Error as error:
        # The error is not chained, because a traceback would show libpq's own text.
        reason = _QUOTED.sub('"…"', str(error).strip())
        raise ConfigurationError(f"{what} cannot be read ({reason}): {_REMEDY}") from None
    url = _URL.match(text)
    if url and "@" in url[1]:
        raise ConfigurationError(f"{what} has an unescaped @ or / before its host: {_REMEDY}")
    if not re.fullmatch(r"[\d,]*", str(found.get("port") or "")):
        raise ConfigurationError(f"{what} has a port that is not a number: {_REMEDY}")
    return found


def without_secrets(text: str) -> str:
    """Return a readable connection string with *** in place of its secrets."""
    shown: dict[str, Any] = {
        name: MASK if _SECRET.search(name) else value for name, value in conninfo_to_dict(text).items()
    }
    return make_conninfo(**shown)


# -- connections -----------------------------------------------------------------------------------


# A psycopg connection: the broker's own, or the application's connection on the atomic path.
Connection: TypeAlias = psycopg.Connection[Any]

_Result = TypeVar("_Result")

# Seconds that a server may take to cancel a statement.
CANCEL_SECONDS: Final = 1.0
_KEEPALIVE: Final = {"keepalives_idle": 10, "keepalives_interval": 5, "keepalives_count": 3, "tcp_user_timeout": 15_000}


class BrokerConnection(psycopg.Connection[TupleRow]):
    """A connection on which the caller can set one deadline for several statements.

    The client enforces it, so a frozen server or a broken network cannot make a caller wait longer. It is not a setting
    on the server, because a connection pooler would pass such a setting on to other clients.

    `is_direct`: the session lasts as long as the connection. If it is False, a pooler may give each transaction another
    session, so the connection prepares no statement, does not LISTEN and sets nothing for its session. `limits_locks`:
    the session has a limit for locks (timeouts.limit_locks_where_direct).
    """

    deadline: float | None = None
    _cancels: bool = False
    is_direct: bool = False
    limits_locks: bool = False

    @contextlib.contextmanager
    def within(self, deadline: float, *, cancel: bool = False) -> Iterator[Self]:
        """Close the connection and raise BrokerUnavailable when a statement waits past `deadline` (monotonic).

        With `cancel`, the client first asks the server to cancel the statement, which then raises psycopg's
        QueryCanceled. If the server has not answered one second after this request, the connection is closed. Without
        `cancel`, the server may continue to wait for the statement's lock.
        """
        self.deadline, self._cancels = deadline, cancel and psycopg.capabilities.has_cancel_safe()
        try:
            yield self
        finally:
            self.deadline, self._cancels = None, False

    def wait(self, gen: PQGen[_Result], interval: float = 0.1, *args: Any, **kwargs: Any) -> _Result:
        """Wait for the server as psycopg does, but not past the deadline."""
        if self.deadline is None:
            return super().wait(gen, interval, *args, **kwargs)
        left = self.deadline - time.monotonic()
        try:
            return super().wait(self._until_deadline(gen), min(interval, max(left, 0.001)), *args, **kwargs)
        except TimeoutError:
            self.close()
            raise BrokerUnavailable(
                "the broker's database did not answer within the deadline. The server may still have executed the "
                "request. Send the same messages again with the same ids: a repeated id stores nothing twice."
            ) from None

    def _until_deadline(self, gen: PQGen[_Result]) -> PQGen[_Result]:
        """Run psycopg's generator `gen`, and check the deadline at least once per interval."""
        try:
            wanted = next(gen)
            while True:
                ready = yield wanted
                if not ready and self.deadline is not None and time.monotonic() >= self.deadline:
                    self._cancel_or_give_up()
                wanted = gen.send(ready)
        except StopIteration as stop:
            result: _Result = stop.value
            return result

    def _cancel_or_give_up(self) -> None:
        if not self._cancels:
            raise TimeoutError
        with contextlib.suppress(psycopg.Error):
            self.cancel_safe(timeout=CANCEL_SECONDS)
        # The new deadline covers the answer to the cancelled statement and the ROLLBACK after it.
        self.deadline, self._cancels = time.monotonic() + CANCEL_SECONDS, False


@dataclass(frozen=True, slots=True)
class ReachedServer:
    """The server and the database that a connection really reaches, regardless of its settings."""

    system_identifier: str
    timeline: int
    database: str


@dataclass(frozen=True)
class BrokerDatabase:
    """A broker: the libpq connection string of its database and the schema of its tables.

    `listen_conninfo` is a direct connection for LISTEN and for the broker process, if `conninfo` goes through a pooler
    in transaction mode. If it is None, `conninfo` is used for LISTEN, too. If it is an empty string, every connection
    goes through a pooler, LISTEN is off and every process polls.
    """

    conninfo: str
    schema: str = "outbox"
    listen_conninfo: str | None = None

    def __post_init__(self) -> None:
        check_schema_name(self.schema)
        for text in (self.conninfo, self.listen_conninfo or ""):
            read_conninfo(text, "the broker's connection string")

    def __repr__(self) -> str:
        listen = self.listen_conninfo and without_secrets(self.listen_conninfo)
        return f"BrokerDatabase({without_secrets(self.conninfo)!r}, schema={self.schema!r}, listen_conninfo={listen!r})"

    @property
    def direct_conninfo(self) -> str:
        """The connection string for sessions that must last as long as their connection."""
        return self.listen_conninfo or self.conninfo

    def connect_as_owner(self) -> psycopg.Connection[TupleRow]:
        """Open a connection that changes the tables, with the login of `conninfo`. Raises BrokerUnavailable.

        It is direct only if LISTEN_URL has the same login: with roles, it has that of a worker, which owns no table.
        """
        listener, own = (conninfo_to_dict(text).get("user") for text in (self.direct_conninfo, self.conninfo))
        return self.connect(name="outbox-install", direct=listener == own)

    def connect(
        self, *, timeout_seconds: float = 3.0, name: str = "outbox", direct: bool = False
    ) -> psycopg.Connection[TupleRow]:
        """Open an autocommit connection, within `timeout_seconds` per host (at least 2, libpq's minimum).

        Statements on it have no deadline. The client notices a dead network within 15 s. Raises BrokerUnavailable.
        """
        return self.open(timeout_seconds=timeout_seconds, name=name, direct=direct)

    def open(self, *, timeout_seconds: float = 3.0, name: str = "outbox", direct: bool = False) -> BrokerConnection:
        """Do the same as `connect`, but return a connection that also accepts deadlines."""
        try:
            connection = BrokerConnection.connect(
                self.session_conninfo(name, direct=direct),
                autocommit=True,
                connect_timeout=max(1, round(timeout_seconds)),
            )
        except psycopg.OperationalError as error:
            raise _unreachable(error, listens=direct and bool(self.listen_conninfo)) from error
        if self.names_pooler(direct=direct) or not _leads_straight(connection, timeout_seconds):
            # Without `prepare_threshold = None`, psycopg would prepare a statement on its sixth execution, or at once
            # with prepare=True.
            connection.prepare_threshold = None
        else:
            connection.is_direct = True
        return connection

    def names_pooler(self, *, direct: bool) -> bool:
        """Whether the settings say that a connection goes through a pooler."""
        return self.listen_conninfo == "" or (self.listen_conninfo is not None and not direct)

    def session_conninfo(self, name: str, *, direct: bool = False) -> str:
        """Return the connection string with keepalive settings, and the session name `name` if it has none."""
        target = self.direct_conninfo if direct else self.conninfo
        given = conninfo_to_dict(target)
        defaults = {key: value for key, value in _KEEPALIVE.items() if key not in given}
        return make_conninfo(target, **defaults, application_name=given.get("application_name") or name)


def _leads_straight(connection: BrokerConnection, timeout_seconds: float) -> bool:
    """Whether the connection reaches the server without a pooler. A pooler reports an invented process id.

    A pooler accepts clients while its server is down, so this also shows whether the server answers. Raises
    BrokerUnavailable.
    """
    try:
        # A pooler connects to its server only when it gets the first statement. So wait at least as long as libpq waits
        # for a connection.
        with connection.within(time.monotonic() + max(2.0, timeout_seconds)):
            row = connection.execute("SELECT pg_backend_pid()").fetchone()
    except psycopg.Error as error:
        connection.close()
        raise _unreachable(error) from error
    return row == (connection.info.backend_pid,)


def _unreachable(error: psycopg.Error, *, listens: bool = False) -> BrokerUnavailable:
    """Return the error of a connection that was not opened; `listens`: its address is LISTEN_URL."""
    # libpq puts its hints on separate lines, but a table shows only the first line.
    said = " ".join(str(error).split()).rstrip("?.")
    if is_refused(error):
        return BrokerUnavailable(
            f"the broker's database refuses another connection: {said}. Nothing was published; let processes open "
            "fewer sessions, or raise the limit (`manage.py outbox_doctor` adds up the sessions)."
        )
    settings = "LISTEN_URL" if listens else "the broker's connection settings"
    return BrokerUnavailable(
        f"the broker's database cannot be reached: {said}. Nothing was published; check {settings} and that its "
        "PostgreSQL runs."
    )


_REACHED: Final = """
SELECT (SELECT system_identifier::text FROM pg_control_system()),
       CASE WHEN pg_is_in_recovery() THEN (SELECT timeline_id FROM pg_control_checkpoint())
            ELSE ('x' || substr(pg_walfile_name(pg_current_wal_insert_lsn()), 1, 8))::bit(32)::integer END,
       current_database()::text
"""


def reached_server(connection: Connection) -> ReachedServer:
    """Return the server and the database that this connection really reaches."""
    with psycopg.Cursor(connection, row_factory=psycopg.rows.tuple_row) as cursor:
        row = cursor.execute(_REACHED).fetchone()
    assert row is not None
    system_identifier, timeline, database = row
    return ReachedServer(system_identifier=system_identifier, timeline=timeline, database=database)


# -- the pool --------------------------------------------------------------------------------------


_KEPT: Final = 8
# A forked child keeps the inherited connections open, because closing one would end a session of its parent.
_inherited: Final[list[object]] = []


class Pool:
    """Idle connections for reuse. Thread-safe. A forked child never uses the connections of its parent."""

    def __init__(self, database: BrokerDatabase) -> None:
        self._database = database
        self._start_anew()

    def _start_anew(self) -> None:
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._idle: list[BrokerConnection] = []
        self._is_closed = False

    def lend(self, deadline: float, use: Callable[[BrokerConnection], _Result]) -> _Result:
        """Return what `use` returns for an autocommit connection whose statements end by `deadline` (monotonic).

        The pool does not keep a broken connection. (A context manager would take six more calls per message.)
        """
        connection = self._take() or self._database.open(timeout_seconds=deadline - time.monotonic())
        connection.deadline = deadline
        try:
            result = use(connection)
        except UsageError:
            # The server has refused the statement and does not execute it any more. The connection can be used again.
            self._give_back(connection)
            raise
        except BaseException:
            connection.close()
            raise
        self._give_back(connection)
        return result

    def _take(self) -> BrokerConnection | None:
        if self._pid != os.getpid():
            _inherited.append(self._idle)
            self._start_anew()
        while True:
            with self._lock:
                if not self._idle:
                    return None
                connection = self._idle.pop()
            if not is_ended(connection):
                return connection
            connection.close()

    def _give_back(self, connection: BrokerConnection) -> None:
        connection.deadline = None
        with self._lock:
            is_idle = connection.pgconn.transaction_status == TransactionStatus.IDLE
            if is_idle and len(self._idle) < _KEPT and not self._is_closed:
                self._idle.append(connection)
                return
        connection.close()

    def clear(self) -> None:
        if self._pid != os.getpid():
            return
        with self._lock:
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()

    def close(self) -> None:
        """Close the idle connections now, and close each lent connection when its thread gives the connection back."""
        self._is_closed = True
        self.clear()


def is_ended(connection: psycopg.Connection[Any]) -> bool:
    """Whether the server has ended this idle session (idle_session_timeout, a restart). It only reads the socket."""
    try:
        # The first call of `consume_input` reads the server's reason, the second one finds the end of the connection.
        for _ in range(2):
            poll = select.poll()
            poll.register(connection.pgconn.socket, select.POLLIN)
            if not poll.poll(0):
                return False
            connection.pgconn.consume_input()
    except (psycopg.Error, OSError, ValueError):
        return True
    return connection.closed
