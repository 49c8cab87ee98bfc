"""Notes in the broker's database about failing parts of running processes.

Without a note, a failing process looks absent.

A part that fails twice in a row stores a note. The note is an incident of the kind `process_failing`. The part stores
the note with plain statements on a separate connection. So the part can store the note even if its own statement,
connection or privilege fails. The part refreshes the note while it keeps failing. When the part works again, the note
becomes `process_failed`.

After the death of a process, its note counts for 90 s more (of publishing 300 s, of a pass that Celery beat starts
1,500 s). A process whose role may not write incidents only writes a log line.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from typing import Final

import psycopg
from psycopg.errors import InsufficientPrivilege

from outbox.broker.database.connection import BrokerDatabase
from outbox.broker.database.executor import Executor
from outbox.broker.database.statement import Statement
from outbox.broker.log.incidents import IncidentKind
from outbox.errors import BrokerUnavailable
from outbox.utils.causes import causes
from outbox.utils.refused_connections import is_refused
from outbox.utils.safe_text import class_name, shown_text, storable

logger = logging.getLogger(__name__)

_REFRESH_SECONDS: Final = 10.0
# A process keeps the note of a part for this time after the part's last failure. A pass of pruning runs every ten
# minutes, and its process refreshes the note in between.
_KEPT_SECONDS: Final = 1500.0
# The limit in seconds for the connection attempt; the statements have a limit of the same length.
_SECONDS: Final = 2.0
# A part stores a note after this many failures in a row, because a single error may concern only one request or pass.
_IN_A_ROW: Final = 2
# The SQLSTATE class of the errors with which a server ends or refuses sessions. The condition `unreachable` and the
# processes' logs report the errors of this class.
_SHUTTING_DOWN: Final = "57P"


class ProcessPart(StrEnum):
    SEQUENCING = "sequencing"
    CONSUMING = "consuming"
    LEASES = "keeping the leases"
    PUBLISHING = "publishing"
    MAINTENANCE = "maintenance"
    SUMMARY = "the summary"
    LEADER_WORK = "the leader's work"
    PASS = "the pass"
    # A pass that Celery beat starts.
    TASK = "the task"

    @property
    def held_seconds(self) -> float:
        """Return the time (seconds) for which a note is valid without a refresh.

        If a note was not refreshed for this time, the process that stored the note may have ended.
        """
        if self is ProcessPart.TASK:
            # No process refreshes the note between two tasks.
            return _KEPT_SECONDS
        return 300.0 if self is ProcessPart.PUBLISHING else 90.0


_INSERT: Final = Statement("""
INSERT INTO {schema}.incident (kind, subject, detail) VALUES (%(kind)s, %(subject)s, %(detail)s) RETURNING incident_id
""")
_REFRESH: Final = Statement("""
UPDATE {schema}.incident SET detail = %(detail)s, at = clock_timestamp() WHERE incident_id = %(id)s
""")
_END: Final = Statement("UPDATE {schema}.incident SET kind = %(kind)s WHERE incident_id = %(id)s")
_FAILING: Final = Statement("""
SELECT subject, detail, extract(epoch FROM clock_timestamp() - at)::double precision
FROM {schema}.incident
WHERE at > clock_timestamp() - make_interval(secs => %(seconds)s) AND kind = %(kind)s
ORDER BY at DESC LIMIT 1000
""")


@dataclass(frozen=True, slots=True)
class FailingPart:
    """A part that fails now. `of`: the groups of the part, separated by commas, or the name of the pass or the
    leader's work. `process`: its id and its host, such as "7004 on web-1"."""

    part: ProcessPart
    of: str
    process: str
    since: str
    seen_seconds: float
    error: str

    def works_for(self, name: str) -> bool:
        """Whether `name` is a group of the part or the name of its pass."""
        return name in self.of.split(", ")


def failing(run: Executor) -> list[FailingPart]:
    """Return the parts that fail now, the most recent failure first."""
    longest = max(part.held_seconds for part in ProcessPart)
    parameters = {"seconds": longest, "kind": str(IncidentKind.PROCESS_FAILING)}
    found = (_parsed(*row) for row in run.rows(_FAILING, parameters))
    return [one for one in found if one is not None and one.seen_seconds <= one.part.held_seconds]


def _parsed(subject: str, detail: str, seen_seconds: float) -> FailingPart | None:
    """Return the part; None for a row that no process has written, because every publisher may insert incidents."""
    what, _, process = subject.rpartition(" in ")
    name, _, of = what.partition(" of ")
    since, _, error = detail.partition(": ")
    if name not in set(ProcessPart):
        return None
    process, since = process.removeprefix("process "), since.removeprefix("since ")
    return FailingPart(ProcessPart(name), of, process, since, seen_seconds, error)


class FailureNote:
    """The note of one part of this process. Never raises; thread-safe and fork-safe.

    `of`: the groups that the part works for, or the name of the pass.
    """

    def __init__(self, database: BrokerDatabase, part: ProcessPart, *, of: str = "", in_a_row: int = _IN_A_ROW) -> None:
        self._database = database
        self._what = f"{part} of {of}" if of else str(part)
        self._in_a_row = in_a_row
        self._held_seconds = part.held_seconds
        self._lock = threading.Lock()
        self._start_anew()

    def _start_anew(self) -> None:
        """Start without a note. After a fork, an existing note belongs to the parent process."""
        self._pid = os.getpid()
        self._failures = 0
        self._since = ""
        self._incident_id: int | None = None
        self._stored_at = self._inserted_at = self._failed_at = 0.0
        self._detail = ""

    def failed(self, error: BaseException, *, is_last: bool = False) -> None:
        """Count one more failure, and store the note at most every ten seconds.

        `is_last` says that the process ends now.
        """
        if _is_about_connecting(error) or self._lock.locked():
            return
        with self._lock:
            if self._pid != os.getpid():
                self._start_anew()
            self._failures += 1
            self._since = self._since or datetime.now(UTC).isoformat(timespec="seconds")
            now = self._failed_at = time.monotonic()
            if (self._failures >= self._in_a_row or is_last) and now - self._stored_at >= _REFRESH_SECONDS:
                said = (shown_text(error).splitlines() or [class_name(error)])[0]
                self._stored_at, self._detail = now, storable(f"since {self._since}: {said}")
                self._store()

    def keep(self) -> None:
        """Refresh the note between two runs of a part that runs rarely, to show that its process still runs."""
        now = time.monotonic()
        # A role that may not change its note adds the next one when the last one ends.
        pause = _REFRESH_SECONDS if self._incident_id is None else self._held_seconds / 4
        is_due = now - self._stored_at >= pause and now - self._failed_at < _KEPT_SECONDS
        if not self._failures or not is_due or self._lock.locked():
            return
        with self._lock:
            if self._pid == os.getpid():
                self._stored_at = now
                self._store()

    def worked(self) -> None:
        """Record that the part works. The call costs nothing if the part has not failed."""
        if not self._failures or self._lock.locked():
            return
        with self._lock:
            incident_id, is_mine = self._incident_id, self._pid == os.getpid()
            self._start_anew()
            if incident_id is not None and is_mine:
                with self._telling() as run:
                    run.execute(_END, {"id": incident_id, "kind": str(IncidentKind.PROCESS_FAILED)}, prepare=False)

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Record a failure if the block raises, and success if it does not."""
        try:
            yield
        except Exception as error:
            self.failed(error)
            raise
        self.worked()

    def _store(self) -> None:
        subject, detail = f"{self._what} in process {self._pid} on {socket.gethostname()}", self._detail
        with self._telling() as run:
            if self._incident_id is None or not self._refresh(run, detail):
                logger.warning("incident %s: %s: %s", IncidentKind.PROCESS_FAILING, subject, detail)
                stored = {"kind": str(IncidentKind.PROCESS_FAILING), "subject": subject, "detail": detail}
                [self._incident_id] = run.one(_INSERT, stored, prepare=False)
                self._inserted_at = self._stored_at

    def _refresh(self, run: Executor, detail: str) -> bool:
        """Refresh the stored note. Returns False if there is no such note any more."""
        values = {"id": self._incident_id, "detail": detail}
        try:
            return bool(run.execute(_REFRESH, values, prepare=False).rowcount)
        except InsufficientPrivilege:
            # A publisher may add notes, but not change them. It adds the next one when this one ends.
            self._incident_id = None
            self._stored_at = self._inserted_at + self._held_seconds - _REFRESH_SECONDS
            raise

    @contextlib.contextmanager
    def _telling(self) -> Iterator[Executor]:
        try:
            opened = self._database.open(name="outbox-failing", timeout_seconds=_SECONDS)
            with contextlib.closing(opened) as connection, connection.within(time.monotonic() + _SECONDS):
                yield Executor(connection, self._database.schema)
        except (psycopg.Error, BrokerUnavailable) as error:
            logger.debug("the note that %s fails, or works again, was not stored: %s", self._what, error)


def _is_about_connecting(error: BaseException) -> bool:
    """Whether the database was unreachable or ended the session, so that it cannot store a note.

    A database that refuses one connection may accept the next one, which stores the note.
    """
    if is_refused(error):
        return False
    of_driver = next((one for one in causes(error) if isinstance(one, psycopg.Error)), None)
    if of_driver is None:
        return isinstance(error, BrokerUnavailable)
    return of_driver.sqlstate is None or of_driver.sqlstate.startswith(_SHUTTING_DOWN)
