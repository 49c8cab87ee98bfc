"""Where a broker lives, and connections to it whose waiting has an end."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final, Self, TypeAlias, TypeVar

import psycopg
from psycopg.abc import PQGen
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from psycopg.rows import TupleRow

from outbox.broker.database.conninfo import read_conninfo, without_secrets
from outbox.broker.database.statement import check_schema_name
from outbox.errors import BrokerUnavailable

# Any psycopg connection: ours, or the application's own on the atomic path.
Connection: TypeAlias = psycopg.Connection[Any]

_Result = TypeVar("_Result")

# How long a server may take to cancel a statement.
CANCEL_SECONDS: Final = 1.0
_KEEPALIVE: Final = {"keepalives_idle": 10, "keepalives_interval": 5, "keepalives_count": 3, "tcp_user_timeout": 15_000}


class BrokerConnection(psycopg.Connection[TupleRow]):
    """A connection whose statements can be given one common deadline.

    The deadline is kept on this side: neither a frozen server nor a cut cable can make a caller wait longer,
    and nothing depends on a server setting that a connection pooler would pass on to others.

    `is_direct`: the session lasts as long as the connection. Where it is False, a pooler may give each transaction
    another session: the connection prepares no statement, does not LISTEN and sets nothing for its session.
    """

    deadline: float | None = None
    _cancels: bool = False
    is_direct: bool = False

    @contextlib.contextmanager
    def within(self, deadline: float, *, cancel: bool = False) -> Iterator[Self]:
        """Close the connection and raise BrokerUnavailable when a statement waits past `deadline` (monotonic).

        With `cancel` the server is asked first to cancel the statement, which then raises psycopg's QueryCanceled; the
        connection is closed a second later. A statement that is left alone goes on waiting for its lock.
        """
        self.deadline, self._cancels = deadline, cancel and psycopg.capabilities.has_cancel_safe()
        try:
            yield self
        finally:
            self.deadline, self._cancels = None, False

    def wait(self, gen: PQGen[_Result], interval: float = 0.1, *args: Any, **kwargs: Any) -> _Result:
        """Wait for the server as psycopg does, but no longer than the deadline."""
        if self.deadline is None:
            return super().wait(gen, interval, *args, **kwargs)
        left = self.deadline - time.monotonic()
        try:
            return super().wait(self._until_deadline(gen), min(interval, max(left, 0.001)), *args, **kwargs)
        except TimeoutError:
            self.close()
            raise BrokerUnavailable(
                "the broker's database did not answer within the deadline. The request may still have been carried "
                "out; sending it again with the same message ids is safe."
            ) from None

    def _until_deadline(self, gen: PQGen[_Result]) -> PQGen[_Result]:
        """What `gen` does, for psycopg's own loop, which comes back here at least once per interval."""
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
        # For the answer to the cancelled statement, and for the ROLLBACK after it.
        self.deadline, self._cancels = time.monotonic() + CANCEL_SECONDS, False


@dataclass(frozen=True, slots=True)
class ReachedServer:
    """Which database of which server a connection really reaches, whatever its settings say."""

    system_identifier: str
    timeline: int
    database: str


@dataclass(frozen=True)
class BrokerDatabase:
    """A broker: the libpq connection string of its database and the schema of its tables.

    `listen_conninfo` is a direct connection for LISTEN and for the broker process, where `conninfo` goes through a
    pooler in transaction mode. None: the same as `conninfo`. Empty: every connection goes through a pooler; LISTEN is
    off, everything polls.
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
        """The connection string to use where a session must last."""
        return self.listen_conninfo or self.conninfo

    def connect(
        self, *, timeout_seconds: float = 3.0, name: str = "outbox", direct: bool = False
    ) -> psycopg.Connection[TupleRow]:
        """A new autocommit connection, within `timeout_seconds` per host (at least 2, libpq's least).

        Statements on it have no deadline of their own but for a dead network, which is noticed within 15 s.
        Raises BrokerUnavailable.
        """
        return self.open(timeout_seconds=timeout_seconds, name=name, direct=direct)

    def open(self, *, timeout_seconds: float = 3.0, name: str = "outbox", direct: bool = False) -> BrokerConnection:
        """Like `connect`, for code that also sets deadlines."""
        try:
            connection = BrokerConnection.connect(
                self.session_conninfo(name, direct=direct),
                autocommit=True,
                connect_timeout=max(1, round(timeout_seconds)),
            )
        except psycopg.OperationalError as error:
            raise _unreachable(error) from error
        if self._names_pooler(direct=direct) or not _leads_straight(connection, timeout_seconds):
            # psycopg would prepare what it executes for the sixth time, and what asks for it at once.
            connection.prepare_threshold = None
        else:
            connection.is_direct = True
        return connection

    def _names_pooler(self, *, direct: bool) -> bool:
        """Whether the settings say that a connection goes through a pooler."""
        return self.listen_conninfo == "" or (self.listen_conninfo is not None and not direct)

    def session_conninfo(self, name: str, *, direct: bool = False) -> str:
        """The connection string of a session called `name`, unless it names itself, that notices a dead network."""
        target = self.direct_conninfo if direct else self.conninfo
        given = conninfo_to_dict(target)
        defaults = {key: value for key, value in _KEEPALIVE.items() if key not in given}
        return make_conninfo(target, **defaults, application_name=given.get("application_name") or name)


def _leads_straight(connection: BrokerConnection, timeout_seconds: float) -> bool:
    """Whether no pooler is in between: a pooler tells its clients a process id of its own making.

    A pooler accepts clients while its server is away, so this is part of connecting. Raises BrokerUnavailable.
    """
    try:
        # At least as long as libpq waits for a connection: a pooler makes one to its server now.
        with connection.within(time.monotonic() + max(2.0, timeout_seconds)):
            row = connection.execute("SELECT pg_backend_pid()").fetchone()
    except psycopg.Error as error:
        connection.close()
        raise _unreachable(error) from error
    return row == (connection.info.backend_pid,)


def _unreachable(error: psycopg.Error) -> BrokerUnavailable:
    # libpq's hints stand on lines of their own; a table shows the first line.
    said = " ".join(str(error).split()).rstrip("?.")
    return BrokerUnavailable(
        f"the broker's database cannot be reached: {said}. Nothing was published; "
        f"check the broker's connection settings and that its PostgreSQL runs."
    )


_REACHED: Final = """
SELECT (SELECT system_identifier::text FROM pg_control_system()),
       CASE WHEN pg_is_in_recovery() THEN (SELECT timeline_id FROM pg_control_checkpoint())
            ELSE ('x' || substr(pg_walfile_name(pg_current_wal_insert_lsn()), 1, 8))::bit(32)::integer END,
       current_database()::text
"""


def reached_server(connection: Connection) -> ReachedServer:
    """Which database of which server this connection really reaches."""
    with psycopg.Cursor(connection, row_factory=psycopg.rows.tuple_row) as cursor:
        row = cursor.execute(_REACHED).fetchone()
    assert row is not None
    system_identifier, timeline, database = row
    return ReachedServer(system_identifier=system_identifier, timeline=timeline, database=database)
