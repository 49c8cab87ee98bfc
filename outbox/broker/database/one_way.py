"""Send requests without waiting for the answers: notifications and end messages.

The sending thread writes the request and continues. The thread reads the answer when it uses the connection again.
libpq's pipeline carries any number of requests, so no request waits for the answer to an earlier request. There is no
background thread, which would need a restart after a fork and would compete for the interpreter's lock.

End messages are not grouped: of 1,196 writes of four threads, three had two end messages, and one statement would make
them one transaction. They do not travel with the next half message either: the last one of a burst would wait for a
timer, and a half message would wait for the lock of an end message. See decision 142.
"""

from __future__ import annotations

import logging
import os
import select
import threading
import time
from collections import deque
from dataclasses import dataclass
from typing import Final

import psycopg
from psycopg.pq import ConnStatus, DiagnosticField, ExecStatus, Format

from outbox.broker.database.connection import BrokerDatabase
from outbox.broker.database.psycopg_internals import (
    READY_R,
    READY_RW,
    READY_W,
    WAIT_W,
    PGconn,
    PGresult,
    PQGenConn,
    Ready,
    Wait,
    connect_generator,
)
from outbox.broker.database.statement import Request, new_statement_name
from outbox.utils.backoff import Backoff

logger = logging.getLogger(__name__)

# At most this many requests are queued, which take some megabytes. A server that leaves so many unfinished is stuck.
MAX_QUEUED: Final = 10_000
# A socket has room for about 270 unread answers. With more unread answers, the server would wait for this client.
_MAX_UNANSWERED: Final = 100
# A sender waits this many seconds for a slow server, and then again only if new answers have arrived.
_CATCH_UP_SECONDS: Final = 0.1
# A request is sent at most this many times: a second time if the connection breaks before the answer.
_MAX_SENT: Final = 2
# A new connection takes some milliseconds. If it takes longer than this, the caller continues, and the next request
# waits for it again. Without this limit, a call that publishes would wait for a slow server.
_CONNECT_WAIT_SECONDS: Final = 1.0
_CONNECT_SECONDS: Final = 3.0
_RECONNECT: Final = Backoff(first_seconds=0.1, longest_seconds=5.0)

_READ_ONLY: Final = b"25006"
_NO_SUCH_STATEMENT: Final = b"26000"
# The first request of a connection. A pooler sends another process id than the server.
_WHOSE_SESSION: Final = Request(b"SELECT pg_backend_pid()", (), "the request for the session's process id")
_GOOD: Final = (ExecStatus.TUPLES_OK, ExecStatus.COMMAND_OK)

# If other code has closed the socket, the operating system reports an error, or poll refuses the closed socket.
_BROKEN: Final = (psycopg.Error, OSError, ValueError)

# A forked child keeps the inherited connections open, because closing one would end a session of its parent.
_inherited: Final[list[object]] = []


@dataclass(slots=True)
class _PendingRequest:
    request: Request
    times_sent: int = 0


class OneWay:
    """A sender of requests with one connection, which is made when it is first needed. Thread-safe and fork-safe.

    A request that cannot be sent is dropped and logged: another process then waits longer.
    """

    def __init__(self, database: BrokerDatabase) -> None:
        self._database = database
        self._start_anew()

    def _start_anew(self) -> None:
        """Start with empty queues. After a fork, the parent process sends the requests that it had queued before."""
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._queued: deque[_PendingRequest] = deque()
        self._unanswered: deque[_PendingRequest] = deque()
        self._pgconn: PGconn | None = None
        self._connecting: PQGenConn[PGconn] | None = None
        self._wanted: tuple[int, Wait] | None = None
        # The names of the prepared statements by their text; None as long as the connection may go through a pooler.
        self._prepared: dict[bytes, bytes] | None = None
        self._give_up_at = 0.0
        self._failures = 0
        self._is_stalled = False
        self._connect_not_before = 0.0
        self.dropped = 0

    def send(self, *requests: Request) -> None:
        """Write the requests in this order and return at once. No error of the server or the network is raised.

        It waits up to 1 s if the server hangs while this process connects (the next attempt follows some seconds
        later), and 0.1 s once if a hundred requests have no answer yet. The next call writes the requests that are
        still queued.
        """
        if self._pid != os.getpid():
            self._notice_fork()
        if len(self._queued) + len(requests) > MAX_QUEUED:
            self._drop(len(requests), "the server does not keep up")
            return
        self._queued.extend(map(_PendingRequest, requests))
        # The thread that finds the connection free writes the requests of all threads, then checks the queue again. So
        # a thread waits only for one that begins in the same moment, and no request stays in the queue. With `acquire`,
        # an exception of a signal handler before the `try` would leave the connection locked for ever.
        while self._queued and not self._lock.locked():
            with self._lock:
                can_write = self._write()
            if not can_write:
                return

    def flush(self, *, within_seconds: float) -> bool:
        """Wait for all answers; returns False if the time ran out or no request could be sent."""
        if self._pid != os.getpid():
            self._notice_fork()
        deadline = time.monotonic() + within_seconds
        while self._queued or self._unanswered:
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            if self._lock.locked():
                time.sleep(min(0.01, left))
                continue
            with self._lock:
                self._write()
                if self._pgconn is not None and self._unanswered:
                    _wait(self._pgconn, max(0.0, deadline - time.monotonic()))
                elif self._queued:
                    time.sleep(min(0.01, max(0.0, deadline - time.monotonic())))
        return True

    def close(self, *, within_seconds: float = 2.0) -> None:
        """Flush and disconnect. A later request opens a new connection."""
        if self._pid != os.getpid():
            return
        self.flush(within_seconds=within_seconds)
        with self._lock:
            if self._pgconn is not None:
                self._pgconn.finish()
            self._pgconn = self._connecting = self._prepared = None
            self._queued.clear()
            self._unanswered.clear()

    def _notice_fork(self) -> None:
        _inherited.append((self._pgconn, self._connecting))
        self._start_anew()

    def _drop(self, number: int, why: str) -> None:
        before, self.dropped = self.dropped, self.dropped + number
        if before == 0 or before // MAX_QUEUED < self.dropped // MAX_QUEUED:
            logger.warning(
                "dropped %d notifications and end messages (%s); polling and check-back replace them",
                self.dropped,
                why,
            )

    # -- the caller of the following methods holds the lock ----------------------------------------------

    def _write(self) -> bool:
        """Read the answers that have arrived, and write the queued requests.

        Return whether the connection accepts more requests.
        """
        try:
            try:
                if self._pgconn is not None:
                    self._read(self._pgconn)
            except _BROKEN as error:
                # The server was restarted or has ended the session: connect again at once.
                self._lose(error)
            try:
                if self._pgconn is None:
                    self._connect_soon()
                return self._pgconn is not None and self._write_queued(self._pgconn)
            except _BROKEN as error:
                self._lose(error)
                self._failures += 1
                self._connect_not_before = time.monotonic() + _RECONNECT.pause_seconds(self._failures)
                return False
        except BaseException as error:
            # After the exception of a signal handler or a failed write, it is not known which requests were written.
            self._lose(error)
            raise

    def _write_queued(self, pgconn: PGconn) -> bool:
        while self._queued:
            room = _MAX_UNANSWERED - len(self._unanswered)
            if not room and not self._has_caught_up(pgconn):
                return False
            count = min(room, len(self._queued))
            # The last of the equal requests that are said once. They are equal if they are the same object.
            last: dict[int, _PendingRequest] = {}
            if count > 1:
                for position in range(count):
                    pending = self._queued[position]
                    if pending.request.is_said_once:
                        last[id(pending.request)] = pending
            for _ in range(count):
                pending = self._queued.popleft()
                if last.get(id(pending.request), pending) is pending:
                    self._write_one(pgconn, pending)
            # If the socket's buffer is full, the next call sends the remaining bytes.
            pgconn.flush()
        return True

    def _write_one(self, pgconn: PGconn, pending: _PendingRequest) -> None:
        """Write a request, and then count it as unanswered.

        The reader waits for each unanswered request, so a request must not be counted before it is written.
        """
        pending.times_sent += 1
        request, prepared = pending.request, self._prepared
        values, formats = list(request.values), [Format.BINARY] * len(request.values)
        try:
            if prepared is None or not values:
                # A utility statement without parameters has no plan.
                pgconn.send_query_params(request.text, values, request.oids or None, formats)
            else:
                name = prepared.get(request.text)
                if name is None:
                    name = prepared[request.text] = new_statement_name()
                    pgconn.send_prepare(name, request.text, request.oids)
                pgconn.send_query_prepared(name, values, formats)
            pgconn.pipeline_sync()
        except _BROKEN:
            # `_lose` queues this request again, like the unanswered requests.
            self._unanswered.append(pending)
            raise
        self._unanswered.append(pending)

    def _has_caught_up(self, pgconn: PGconn) -> bool:
        if self._is_stalled:
            return False
        self._is_stalled = not _wait(pgconn, _CATCH_UP_SECONDS)
        self._read(pgconn)
        return not self._is_stalled

    def _read(self, pgconn: PGconn) -> None:
        pgconn.consume_input()
        while self._unanswered and not pgconn.is_busy():
            result = pgconn.get_result()
            if result is None:
                # libpq returns None after the results of a statement, before the synchronisation point.
                if pgconn.status != ConnStatus.OK:
                    raise psycopg.OperationalError(_message(pgconn))
            elif result.status == ExecStatus.PIPELINE_SYNC:
                self._unanswered.popleft()
                self._failures = 0
                self._is_stalled = False
            elif result.status not in _GOOD:
                if pgconn.status != ConnStatus.OK:
                    raise psycopg.OperationalError(_message(pgconn))
                self._refused(result)
            elif self._unanswered[0].request is _WHOSE_SESSION and result.get_value(0, 0) == b"%d" % pgconn.backend_pid:
                self._prepared = {}
        if not self._unanswered:
            # A server that ends a session first sends the reason. This second read finds the end of the connection.
            pgconn.consume_input()

    def _refused(self, result: PGresult) -> None:
        if result.status == ExecStatus.PIPELINE_ABORTED:
            # The statement could not be prepared, and this error was already logged.
            return
        if self._prepared is not None:
            # The refused statement may be the one that prepares. If a prepared statement is gone, the session did not
            # last as long as the connection, so an unknown pooler is in between.
            is_gone = result.error_field(DiagnosticField.SQLSTATE) == _NO_SUCH_STATEMENT
            self._prepared = None if is_gone else {}
        said = (result.error_message or b"").decode(errors="replace").strip()
        if result.error_field(DiagnosticField.SQLSTATE) == _READ_ONLY:
            # This server was the primary, and is now read-only. The next connection may reach the present primary.
            raise psycopg.OperationalError(said)
        logger.warning(
            "%s was not sent or failed; polling or check-back does the same work later: %s",
            self._unanswered[0].request.what,
            said,
        )

    def _lose(self, error: BaseException) -> None:
        """Close the lost connection, and queue its unanswered requests again."""
        logger.info("the connection for notifications and end messages broke: %s", str(error).strip())
        if self._pgconn is not None:
            self._pgconn.finish()
        self._pgconn = self._connecting = self._prepared = None
        asked = [pending for pending in self._unanswered if pending.request is not _WHOSE_SESSION]
        again = [pending for pending in asked if pending.times_sent < _MAX_SENT]
        if lost := len(asked) - len(again):
            self._drop(lost, str(error).strip())
        self._unanswered.clear()
        self._queued.extendleft(reversed(again))

    def _connect_soon(self) -> None:
        """Connect without a long wait, if the pause after a failure is over."""
        now = time.monotonic()
        patience = 0.0
        if self._connecting is None:
            if now < self._connect_not_before:
                return
            self._connecting = connect_generator(self._database.session_conninfo("outbox-one-way"))
            self._wanted = next(self._connecting)
            self._give_up_at = now + _CONNECT_SECONDS
            patience = _CONNECT_WAIT_SECONDS
        elif now >= self._give_up_at:
            raise psycopg.OperationalError("the server does not answer")
        self._connect(self._connecting, now + patience)

    def _connect(self, connecting: PQGenConn[PGconn], deadline: float) -> None:
        assert self._wanted is not None
        try:
            while True:
                descriptor, wanted = self._wanted
                ready = READY_W if wanted & WAIT_W else READY_R
                if not _poll(descriptor, ready, max(0.0, deadline - time.monotonic())):
                    return
                self._wanted = connecting.send(ready)
        except StopIteration as done:
            pgconn: PGconn = done.value
        self._connecting = None
        pgconn.notice_handler = _warned
        pgconn.nonblocking = 1
        pgconn.enter_pipeline_mode()
        self._pgconn = pgconn
        if not self._database.names_pooler(direct=False):
            self._write_one(pgconn, _PendingRequest(_WHOSE_SESSION))


def _wait(pgconn: PGconn, seconds: float) -> bool:
    """Wait until answers arrive or unsent data can be written; return False if neither happens within `seconds`."""
    wanted = READY_RW if pgconn.flush() else READY_R
    return _poll(pgconn.socket, wanted, seconds)


def _poll(descriptor: int, ready: Ready, seconds: float) -> bool:
    poller = select.poll()
    events = (select.POLLIN if ready & READY_R else 0) | (select.POLLOUT if ready & READY_W else 0)
    poller.register(descriptor, events)
    return bool(poller.poll(seconds * 1000))


def _warned(result: PGresult) -> None:
    """Log the warnings that the SQL functions of the schema raise."""
    if result.error_field(DiagnosticField.SEVERITY_NONLOCALIZED) == b"WARNING":
        logger.warning("%s", (result.error_field(DiagnosticField.MESSAGE_PRIMARY) or b"").decode(errors="replace"))


def _message(pgconn: PGconn) -> str:
    return pgconn.error_message.decode(errors="replace").strip() or "the server closed the connection"
