"""Ends the sessions of a run as soon as another session waits for their locks.

The session that holds a snapshot also holds a lock on each table that it has read. An ALTER TABLE waits for this lock,
and everything that reads the table afterwards waits behind the ALTER TABLE: the application, and the run's own
executors. PostgreSQL sees no deadlock, because the executors and the snapshot are connected only in our process.
"""

from __future__ import annotations

import threading
from typing import Any, Final

from ..common.errors import RunIncomplete
from ..common.safe_text import mask_passwords, quoted
from . import adbc

LOOK_SECONDS: Final = 1.0
_CLOSE_SECONDS: Final = 5.0
# A run does not give way to a session that has waited for a shorter time: retention and upgrades of the broker wait
# less than this for a lock, and then try again.
_SESSIONS: Final = """
WITH ours AS (
    SELECT l.pid FROM pg_locks l JOIN pg_stat_activity a USING (pid)
    WHERE l.locktype = 'advisory' AND l.classid = {lock_class} AND l.objid = {lock} AND l.granted
      AND a.datname = current_database() AND a.usename = session_user AND l.pid <> pg_backend_pid()
), waits AS (
    SELECT pid, pg_blocking_pids(pid) AS blockers FROM pg_locks
    WHERE NOT granted AND waitstart < clock_timestamp() - interval '1 s' AND pid NOT IN (SELECT pid FROM ours)
)
SELECT waits.pid, left(coalesce(nullif(a.query, ''), a.backend_type, ''), 120), (SELECT array_agg(pid)::text FROM ours)
FROM waits LEFT JOIN pg_stat_activity a USING (pid)
WHERE waits.blockers && (SELECT array_agg(pid) FROM ours)
LIMIT 1
"""


class BlockingWatch:
    """Looks every second, in a thread and over a connection of its own, whether a session waits for a run's sessions.

    If the watch cannot look, for example because a pool has no further connection, the run continues. Then it ends when
    it waits for a lock itself (adbc.LOCK_SECONDS).
    """

    def __init__(self, url: str, name: str, database: str) -> None:
        """`name` is the application_name of the run's sessions."""
        self._url, self._database = url, database
        self._statement = _SESSIONS.format(lock_class=adbc.LOCK_CLASS, lock=adbc.lock_of(name))
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._look, name="outbox-reconcile-blocking", daemon=True)
        self.gave_way: RunIncomplete | None = None
        """The error of the run, if the watch has ended the sessions of the run."""
        self._thread.start()

    def close(self) -> None:
        """End the thread. Call this after the run has closed its own connections."""
        self._closed.set()
        self._thread.join(_CLOSE_SECONDS)

    def _look(self) -> None:
        import adbc_driver_manager

        connection: Any = None
        while self.gave_way is None and not self._closed.wait(LOOK_SECONDS):
            try:
                connection = connection or adbc.connect(self._url)
                self._give_way(connection)
            except adbc_driver_manager.Error:
                adbc.close(connection)
                connection = None
        adbc.close(connection)

    def _give_way(self, connection: Any) -> None:
        with connection.cursor() as cursor:
            cursor.execute(self._statement)
            found = cursor.fetchone()
            if found is None:
                return
            pid, statement, ours = found
            # Set before the sessions end, so that the run finds the reason when it gets an error from one of them.
            self.gave_way = RunIncomplete(
                f"database {self._database!r}: session {pid} ({quoted(mask_passwords(statement))}) waited for a lock "
                f"that this run held, and everything that uses the same table would have waited behind it. So the run "
                f"ended its snapshot. Nothing was published; the previous result stays in force. Run it again after "
                f"that statement has ended."
            )
            cursor.execute(f"SELECT count(pg_terminate_backend(pid)) FROM unnest('{ours}'::int[]) pid")
            cursor.fetchall()
