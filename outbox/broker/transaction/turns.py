"""Turns of periodic passes: of all processes that could run a pass now, one runs it.

The worker runs check-back and the other passes itself. No process holds a lease for a pass: if one hangs, another
process runs the next pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from uuid import UUID

from outbox.broker.database.arrays import texts, uuids
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

# The producer groups of these transactions whose check-back has not run for three intervals.
_SILENT = Statement("""
SELECT asked.producer_group, extract(epoch FROM clock_timestamp() - last.began_at)::double precision
FROM (SELECT DISTINCT producer_group FROM {schema}.pending_check WHERE transaction_id = ANY(%(ids)s::uuid[])) AS asked
LEFT JOIN {schema}.periodic_pass last ON last.producer_group = asked.producer_group AND last.name = %(name)s
WHERE coalesce(last.began_at < clock_timestamp() - make_interval(secs => 3 * last.interval_seconds), true)
ORDER BY asked.producer_group
""")


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


_FORGET_OTHERS = Statement("""
DELETE FROM {schema}.periodic_pass
WHERE producer_group = %(group)s AND name <> ALL (%(names)s::text[]) AND position(%(of_part)s IN name) = 0
  AND began_at < clock_timestamp() - make_interval(secs => 10 * interval_seconds)
""")


def forget_others(run: Executor, producer_group: str, names: Sequence[str]) -> None:
    """Delete the turns of passes that the service has no longer, such as those of a part that was removed.

    `names` are its passes. A turn that a process took recently stays, because this process may have another version.
    """
    run.execute(_FORGET_OTHERS, {"group": producer_group, "names": texts(names), "of_part": OF_PART})


_NEWEST_PASS = Statement("""
SELECT name, extract(epoch FROM clock_timestamp() - began_at)::double precision AS seconds
FROM {schema}.periodic_pass
WHERE producer_group = %(group)s
  AND began_at > clock_timestamp() - make_interval(secs => greatest(60, 3 * interval_seconds))
ORDER BY began_at DESC LIMIT 1
""")
_UNDECIDED = Statement("""
SELECT count(*) FROM {schema}.pending_check pending
WHERE producer_group = %(group)s
  AND NOT EXISTS (SELECT FROM {schema}.op_log decided WHERE decided.transaction_id = pending.transaction_id)
""")
_RETIRE = Statement("""
WITH turns AS (
    DELETE FROM {schema}.periodic_pass WHERE producer_group = %(group)s RETURNING 1
), tables AS (
    DELETE FROM {schema}.pruned_table WHERE producer_group = %(group)s RETURNING 1
), seen AS (
    DELETE FROM {schema}.producer_group WHERE name = %(group)s
)
SELECT (SELECT count(*) FROM turns) + (SELECT count(*) FROM tables)
""")


def why_in_use(run: Executor, producer_group: str) -> str:
    """The reason why a producer group cannot be retired; '' if it can."""
    newest, [undecided] = (
        run.row(_NEWEST_PASS, {"group": producer_group}),
        run.one(_UNDECIDED, {"group": producer_group}),
    )
    if undecided:
        return f"it has undecided transactions ({undecided:,}), and only its own processes can answer for them"
    return "" if newest is None else f"one of its processes began the pass {newest[0]} {newest[1]:.0f} s ago"


def retire(run: Executor, producer_group: str) -> int:
    """Delete what the broker knows of the passes of a producer group. Return the number of deleted rows."""
    return int(run.one(_RETIRE, {"group": producer_group})[0])


def silent_groups(run: Executor, transaction_ids: Sequence[UUID]) -> dict[str, float | None]:
    """Return the producer groups of these undecided transactions of which no process runs check-back.

    The value is the time since the last pass began, in seconds; None before the first pass.
    """
    return dict(run.rows(_SILENT, {"ids": uuids(transaction_ids), "name": CHECK_BACK}))
