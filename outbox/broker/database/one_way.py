"""Requests whose answers nobody waits for: wake-ups and ends.

The thread that has one writes it and goes on; the answer is read when the connection is used next. libpq's pipeline
carries any number of them, so that none has to wait for the answer to the one before, and the last one is on its way
like the first. No thread takes part: there is none to start after a fork or to fight with for the interpreter's lock,
and a server of web processes needs no switch for threads.
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
from psycopg import generators, waiting
from psycopg.abc import PQGenConn
from psycopg.pq import ConnStatus, DiagnosticField, ExecStatus
from psycopg.pq.abc import PGconn, PGresult

from outbox.backoff import Backoff
from outbox.broker.database.connection import BrokerDatabase

logger = logging.getLogger(__name__)

# Some megabytes; a server that leaves so much undone stands still.
MAX_QUEUED: Final = 10_000
# A socket has room for some 270 answers that nobody has read; behind that the server would wait for us.
_MAX_UNANSWERED: Final = 100
# How long a sender lets a server that is so far behind catch up: once, until there are answers again.
_CATCH_UP_SECONDS: Final = 0.1
# A request that was on its way when the connection broke is sent once more.
_MAX_SENT: Final = 2
# A new connection takes some milliseconds. One that takes longer is gone on with at the next use: publishing itself
# waits for such a server, too.
_CONNECT_WAIT_SECONDS: Final = 1.0
_CONNECT_SECONDS: Final = 3.0
_RECONNECT: Final = Backoff(first_seconds=0.1, longest_seconds=5.0)

_READ_ONLY: Final = b"25006"
_GOOD: Final = (ExecStatus.TUPLES_OK, ExecStatus.COMMAND_OK)

# A socket that was closed under us is told by the system, or refused by poll.
_BROKEN: Final = (psycopg.Error, OSError, ValueError)

# Connections inherited by fork are kept, not closed: closing would end the parent's session.
_inherited: Final[list[object]] = []


@dataclass(frozen=True, slots=True)
class Request:
    """A statement with numbered parameters, given as text; a transaction of its own.

    It may be executed twice. `what` is for the log; `is_said_once`: of equal ones that are written together the last
    will do.
    """

    text: bytes
    values: tuple[bytes | None, ...]
    what: str
    is_said_once: bool = False


@dataclass(slots=True)
class _PendingRequest:
    request: Request
    times_sent: int = 0


class OneWay:
    """One connection of this process, made when first needed. Thread-safe and fork-safe.

    What does not get through is dropped and logged: the senders' requests only save others a wait.
    """

    def __init__(self, database: BrokerDatabase, *, name: str = "outbox-one-way") -> None:
        self._database = database
        self._name = name
        self._start_anew()

    def _start_anew(self) -> None:
        """Also after a fork: what was queued before it is the parent's to send."""
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._queued: deque[_PendingRequest] = deque()
        self._unanswered: deque[_PendingRequest] = deque()
        self._pgconn: PGconn | None = None
        self._connecting: PQGenConn[PGconn] | None = None
        self._wanted: tuple[int, waiting.Wait] | None = None
        self._give_up_at = 0.0
        self._failures = 0
        self._is_stalled = False
        self._connect_not_before = 0.0
        self.dropped = 0

    def send(self, *requests: Request) -> None:
        """Write the requests, in this order, and return at once; no state of server or network makes it fail.

        Only a new connection takes a moment (1 s where the server hangs, and then not again for some seconds), and a
        server that is a hundred requests behind is given 0.1 s, once, to catch up. What is queued then goes with the
        next use.
        """
        self._notice_fork()
        if len(self._queued) + len(requests) > MAX_QUEUED:
            self._drop(len(requests), "the server does not keep up")
            return
        self._queued.extend(map(_PendingRequest, requests))
        # Whoever finds the connection free writes what everybody has queued, and looks again when it is free once more:
        # nobody waits for it, and nothing is left behind.
        while self._queued and self._lock.acquire(blocking=False):
            try:
                can_write = self._write()
            finally:
                self._lock.release()
            if not can_write:
                return

    def flush(self, *, within_seconds: float) -> bool:
        """Wait until everything was answered; False when time ran out first, or nothing could be sent."""
        self._notice_fork()
        deadline = time.monotonic() + within_seconds
        while self._queued or self._unanswered:
            left = deadline - time.monotonic()
            if left <= 0 or not self._lock.acquire(timeout=left):
                return False
            try:
                self._write()
                if self._pgconn is not None and self._unanswered:
                    _wait(self._pgconn, max(0.0, deadline - time.monotonic()))
                elif self._queued:
                    time.sleep(min(0.01, max(0.0, deadline - time.monotonic())))
            finally:
                self._lock.release()
        return True

    def close(self, *, within_seconds: float = 2.0) -> None:
        """Flush and disconnect. Used again, it connects again."""
        if self._pid != os.getpid():
            return
        self.flush(within_seconds=within_seconds)
        with self._lock:
            if self._pgconn is not None:
                self._pgconn.finish()
            self._pgconn = self._connecting = None
            self._queued.clear()
            self._unanswered.clear()

    def _notice_fork(self) -> None:
        if self._pid != os.getpid():
            _inherited.append((self._pgconn, self._connecting))
            self._start_anew()

    def _drop(self, number: int, why: str) -> None:
        before, self.dropped = self.dropped, self.dropped + number
        if before == 0 or before // MAX_QUEUED < self.dropped // MAX_QUEUED:
            logger.warning("%d wake-ups and end messages dropped so far (%s); others make good", self.dropped, why)

    # -- what follows is called with the lock -----------------------------------------------------------

    def _write(self) -> bool:
        """Write what is queued, having read the answers that are there; whether more could be written."""
        try:
            return self._read_and_write()
        except BaseException as error:
            # Of a request that cannot be written, or raised into this by a signal handler (a time limit): how much of
            # what was written, and which answers were read, is not known any more.
            self._lose(error)
            raise

    def _read_and_write(self) -> bool:
        try:
            self._read()
        except _BROKEN as error:
            # The server was restarted, or has ended the session: at once again.
            self._lose(error)
        try:
            if not self._is_connected():
                return False
            assert self._pgconn is not None
            return self._write_queued(self._pgconn)
        except _BROKEN as error:
            self._lose(error)
            self._failures += 1
            self._connect_not_before = time.monotonic() + _RECONNECT.pause_seconds(self._failures)
            return False

    def _write_queued(self, pgconn: PGconn) -> bool:
        while self._queued:
            room = _MAX_UNANSWERED - len(self._unanswered)
            if not room and not self._has_caught_up(pgconn):
                return False
            count = min(room, len(self._queued))
            ahead = [self._queued[position] for position in range(count)]
            last = {errand.request: errand for errand in ahead if errand.request.is_said_once}
            for _ in range(count):
                errand = self._queued.popleft()
                if last.get(errand.request, errand) is errand:
                    self._write_one(pgconn, errand)
            # What does not fit into the socket's buffer goes with the next use.
            pgconn.flush()
        return True

    def _write_one(self, pgconn: PGconn, errand: _PendingRequest) -> None:
        """Noted as unanswered once it is written: for the answer to what never was, the reader would wait for ever."""
        errand.times_sent += 1
        try:
            pgconn.send_query_params(errand.request.text, list(errand.request.values))
            pgconn.pipeline_sync()
        except _BROKEN:
            # Sent once more, like what it has not answered.
            self._unanswered.append(errand)
            raise
        self._unanswered.append(errand)

    def _has_caught_up(self, pgconn: PGconn) -> bool:
        if self._is_stalled:
            return False
        self._is_stalled = not _wait(pgconn, _CATCH_UP_SECONDS)
        self._read()
        return not self._is_stalled

    def _read(self) -> None:
        pgconn = self._pgconn
        if pgconn is None:
            return
        pgconn.consume_input()
        self._take_answers(pgconn)
        if not self._unanswered:
            # A server that ends the session says so first; the end itself is behind that.
            pgconn.consume_input()

    def _take_answers(self, pgconn: PGconn) -> None:
        while self._unanswered and not pgconn.is_busy():
            result = pgconn.get_result()
            if result is None:
                # Between the results of a statement and its synchronisation point.
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

    def _refused(self, result: PGresult) -> None:
        said = (result.error_message or b"").decode(errors="replace").strip()
        if result.error_field(DiagnosticField.SQLSTATE) == _READ_ONLY:
            # It was the primary; the next connection may lead to the one of now.
            raise psycopg.OperationalError(said)
        logger.warning("%s was not done, others make good: %s", self._unanswered[0].request.what, said)

    def _lose(self, error: BaseException) -> None:
        """The connection is gone; what it had not answered is queued again."""
        logger.info("the connection of wake-ups and ends broke: %s", str(error).strip())
        if self._pgconn is not None:
            self._pgconn.finish()
        self._pgconn = self._connecting = None
        again = [errand for errand in self._unanswered if errand.times_sent < _MAX_SENT]
        if lost := len(self._unanswered) - len(again):
            self._drop(lost, str(error).strip())
        self._unanswered.clear()
        self._queued.extendleft(reversed(again))

    def _is_connected(self) -> bool:
        """Connect where that is due, without waiting long."""
        if self._pgconn is not None:
            return True
        now = time.monotonic()
        patience = 0.0
        if self._connecting is None:
            if now < self._connect_not_before:
                return False
            self._connecting = generators.connect(self._database.session_conninfo(self._name))
            self._wanted = next(self._connecting)
            self._give_up_at = now + _CONNECT_SECONDS
            patience = _CONNECT_WAIT_SECONDS
        elif now >= self._give_up_at:
            raise psycopg.OperationalError("the server does not answer")
        self._connect(self._connecting, now + patience)
        return self._pgconn is not None

    def _connect(self, connecting: PQGenConn[PGconn], deadline: float) -> None:
        assert self._wanted is not None
        try:
            while True:
                descriptor, wanted = self._wanted
                ready = waiting.READY_W if wanted & waiting.WAIT_W else waiting.READY_R
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


def _wait(pgconn: PGconn, seconds: float) -> bool:
    """Until something arrives, and whether; what is still to be written may have to go first."""
    wanted = waiting.READY_RW if pgconn.flush() else waiting.READY_R
    return _poll(pgconn.socket, wanted, seconds)


def _poll(descriptor: int, ready: waiting.Ready, seconds: float) -> bool:
    poller = select.poll()
    events = (select.POLLIN if ready & waiting.READY_R else 0) | (select.POLLOUT if ready & waiting.READY_W else 0)
    poller.register(descriptor, events)
    return bool(poller.poll(seconds * 1000))


def _warned(result: PGresult) -> None:
    """What the functions of the schema have to say beside their answers."""
    if result.error_field(DiagnosticField.SEVERITY_NONLOCALIZED) == b"WARNING":
        logger.warning("%s", (result.error_field(DiagnosticField.MESSAGE_PRIMARY) or b"").decode(errors="replace"))


def _message(pgconn: PGconn) -> str:
    return pgconn.error_message.decode(errors="replace").strip() or "the server closed the connection"
