"""Turns of periodic passes: of all processes that could run a pass now, one runs it.

The worker runs check-back and the other passes itself. If beat ran them and was not started, check-back would stop
without an error. No process holds a lease for a pass: if one hangs, another process runs the
next pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from uuid import UUID

from outbox.broker.database.arrays import uuids
from outbox.broker.database.executor import Executor
from outbox.broker.database.statement import Statement

CHECK_BACK = "check_back"
# This character is in the names of turns that a part takes for several things of its own. If such a turn is late, no
# transaction stays undecided, so a condition of the part reports it.
OF_PART = ":"

# The statement uses clock_timestamp() instead of now(). The statement may have waited for a lock of the row, and the
# comparison needs the time after this wait.
_TAKE_TURN = Statement("""
INSERT INTO {schema}.periodic_pass AS known (producer_group, name, interval_seconds, began_at)
VALUES (%(group)s, %(name)s, %(interval)s, clock_timestamp())
ON CONFLICT (producer_group, name) DO UPDATE
SET interval_seconds = excluded.interval_seconds, began_at = clock_timestamp()
-- A time in the future comes from another server's clock, before a failover.
WHERE known.began_at NOT BETWEEN clock_timestamp() - make_interval(secs => %(rest)s) AND clock_timestamp()
RETURNING 1
""")

# The statement finds checks that are overdue by at least three intervals of the pass. A claimed check is not overdue
# before its recheck time.
_UNASKED = Statement("""
SELECT pending.producer_group, count(*) AS transactions,
       extract(epoch FROM now() - min(pending.due_at))::double precision AS overdue_seconds,
       extract(epoch FROM now() - last.began_at)::double precision AS last_pass_seconds
FROM {schema}.pending_check pending
LEFT JOIN {schema}.periodic_pass last
    ON last.producer_group = pending.producer_group AND last.name = %(name)s
WHERE parked_at IS NULL
  AND pending.due_at < now() - make_interval(secs => 3 * coalesce(last.interval_seconds, %(interval)s))
  AND coalesce(last.began_at < now() - make_interval(secs => 3 * last.interval_seconds), true)
  AND NOT EXISTS (SELECT FROM {schema}.op_log WHERE op_log.transaction_id = pending.transaction_id)
GROUP BY pending.producer_group, last.began_at
ORDER BY pending.producer_group
""")

# The producer groups of these transactions whose check-back has not run for three intervals.
_SILENT = Statement("""
SELECT asked.producer_group, extract(epoch FROM clock_timestamp() - last.began_at)::double precision
FROM (SELECT DISTINCT producer_group FROM {schema}.pending_check WHERE transaction_id = ANY(%(ids)s::uuid[])) AS asked
LEFT JOIN {schema}.periodic_pass last ON last.producer_group = asked.producer_group AND last.name = %(name)s
WHERE coalesce(last.began_at < clock_timestamp() - make_interval(secs => 3 * last.interval_seconds), true)
ORDER BY asked.producer_group
""")

_DEFAULT_INTERVAL_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class IdleProducerGroup:
    """A producer group whose undecided transactions are due for a check, but whose processes do not ask for checks.

    `last_pass_seconds`: the time since the last pass began; None before the first pass.
    """

    producer_group: str
    transactions: int
    overdue_seconds: float
    last_pass_seconds: float | None

    def __str__(self) -> str:
        last = "never ran" if self.last_pass_seconds is None else f"last ran {self.last_pass_seconds:.0f} s ago"
        return (
            f"producer group {self.producer_group!r}: {self.transactions} undecided transactions wait for check-back "
            f"(overdue by {self.overdue_seconds:.0f} s), which {last}: start a worker of this producer group (celery "
            f"worker --outbox, or outbox_worker), and find out why no such worker runs"
        )


def take_turn(
    run: Executor, producer_group: str, name: str, *, interval_seconds: float, rest_seconds: float | None = None
) -> bool:
    """Return whether the caller should run the pass now: not if the pass began less than `rest_seconds` ago.

    The default of `rest_seconds` is half of `interval_seconds`. So several processes together begin
    the pass at most once in this time, and a process that calls this function a little early still gets its turn.
    """
    rest = interval_seconds / 2 if rest_seconds is None else rest_seconds
    parameters = {"group": producer_group, "name": name, "interval": interval_seconds, "rest": rest}
    return run.row(_TAKE_TURN, parameters) is not None


_FORGET = Statement("DELETE FROM {schema}.periodic_pass WHERE name = %(name)s")


def forget(run: Executor, name: str) -> int:
    """Delete a pass that no process runs any more, and return how many producer groups had this pass."""
    return run.count(_FORGET, {"name": name})


def unasked(run: Executor) -> list[IdleProducerGroup]:
    """Return the producer groups whose transactions wait for a check, and of which no process runs check-back."""
    return run.objects(IdleProducerGroup, _UNASKED, {"name": CHECK_BACK, "interval": _DEFAULT_INTERVAL_SECONDS})


def silent_groups(run: Executor, transaction_ids: Sequence[UUID]) -> dict[str, float | None]:
    """Return the producer groups of these undecided transactions of which no process runs check-back.

    The value is the time since the last pass began, in seconds; None before the first pass.
    """
    return dict(run.rows(_SILENT, {"ids": uuids(transaction_ids), "name": CHECK_BACK}))
