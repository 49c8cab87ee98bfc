"""A cheap probe: the broker answers and makes progress. Two look-ups by index, at any size of the log."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from outbox.broker.database.executor import Executor, Snapshot
from outbox.broker.database.statement import Statement
from outbox.broker.fastpath.arrays import xids
from outbox.broker.operations.thresholds import Thresholds

LEADER: Final = Statement("""
SELECT (SELECT owner::text FROM {schema}.leader_lease WHERE role = 'sequencer' AND expires_at > clock_timestamp()),
       (SELECT snapshot::text FROM {schema}.tick ORDER BY tick_id DESC LIMIT 1)
""")

# The age of the oldest decision that the last tick could not see: the lowest transaction id stands for the oldest.
_UNREAD: Final = Statement("""
SELECT extract(epoch FROM clock_timestamp() - min(decided_at))::double precision
FROM (
    (SELECT decided_at FROM {schema}.op_log
     WHERE xid >= %(xmax)s::xid8 AND xid < pg_snapshot_xmax(pg_current_snapshot()) ORDER BY xid LIMIT 1)
    UNION ALL
    (SELECT decided_at FROM {schema}.op_log WHERE xid = ANY (%(xip)s::xid8[]))
) AS unread
""")


@dataclass(frozen=True, slots=True)
class Health:
    """Healthy when there is no problem; each problem is a sentence."""

    problems: tuple[str, ...] = ()

    @property
    def is_healthy(self) -> bool:
        """Whether the broker makes progress."""
        return not self.problems


def unread_seconds(run: Executor, snapshot: str) -> float | None:
    """Return how long the oldest decision waits that the tick with this snapshot could not see; None without one."""
    seen = Snapshot.parse(snapshot)
    # Not prepared: without the values, the plan would read the whole table.
    [seconds] = run.one(_UNREAD, {"xmax": str(seen.xmax), "xip": xids(seen.in_progress)}, prepare=False)
    return None if seconds is None else float(seconds)


def probe(run: Executor, limits: Thresholds | None = None) -> Health:
    """Check that a process sequences, and in time. Raises psycopg.Error."""
    limits = limits or Thresholds()
    leader, snapshot = run.one(LEADER)
    if leader is None:
        return Health(("no process sequences: start a worker with --outbox, or outbox_worker",))
    seconds = unread_seconds(run, snapshot)
    if limits.tick_late_seconds.judge(seconds):
        return Health((f"decided messages have waited {seconds:.0f} s for the sequencer",))
    return Health()
