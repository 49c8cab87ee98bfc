"""Whose turn a periodic pass is: of all processes that could run it now, one does."""

from __future__ import annotations

from dataclasses import dataclass

from outbox.broker.database.executor import Executor
from outbox.broker.database.statement import Statement

CHECK_BACK = "check_back"
# Begins the name of a pass that is a receiver's round: nothing is undecided when it is late, but nobody receives.
RECEIVE = "receive:"

# The clock and not now(): who waited for the row has to see the time at which it is compared.
_TAKE_TURN = Statement("""
INSERT INTO {schema}.periodic_pass AS known (producer_group, name, interval_seconds, began_at)
VALUES (%(group)s, %(name)s, %(interval)s, clock_timestamp())
ON CONFLICT (producer_group, name) DO UPDATE
SET interval_seconds = excluded.interval_seconds, began_at = clock_timestamp()
-- A time to come is that of another clock, before a failover.
WHERE known.began_at NOT BETWEEN clock_timestamp() - make_interval(secs => %(rest)s) AND clock_timestamp()
RETURNING 1
""")

# Due since several intervals: a check that is claimed is due again only after its recheck time.
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

_DEFAULT_INTERVAL_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class IdleProducerGroup:
    """A producer group that is to be asked about undecided transactions, and does not ask.

    `last_pass_seconds`: since when no pass has begun; None where none ever has.
    """

    producer_group: str
    transactions: int
    overdue_seconds: float
    last_pass_seconds: float | None

    def __str__(self) -> str:
        last = "never ran" if self.last_pass_seconds is None else f"last ran {self.last_pass_seconds:.0f} s ago"
        return (
            f"producer group {self.producer_group!r}: {self.transactions} undecided transactions wait for check-back "
            f"(overdue by {self.overdue_seconds:.0f} s), which {last}: start a worker of that service (celery worker "
            f"--outbox, or outbox_worker), and see why none runs"
        )


def take_turn(
    run: Executor, producer_group: str, name: str, *, interval_seconds: float, rest_seconds: float | None = None
) -> bool:
    """Whether the caller is to run the pass now: not when it has begun less than `rest_seconds` ago, elsewhere.

    By default that is half of `interval_seconds`, so that of several drivers one suffices and none has to be punctual.
    """
    rest = interval_seconds / 2 if rest_seconds is None else rest_seconds
    parameters = {"group": producer_group, "name": name, "interval": interval_seconds, "rest": rest}
    return run.row(_TAKE_TURN, parameters) is not None


_FORGET = Statement("DELETE FROM {schema}.periodic_pass WHERE name = %(name)s")


def forget(run: Executor, name: str) -> int:
    """Nobody runs the pass any more, and nobody is to miss it; returns how many groups had it."""
    return run.count(_FORGET, {"name": name})


def unasked(run: Executor) -> list[IdleProducerGroup]:
    """The producer groups whose check-back is absent while transactions wait for it."""
    return run.objects(IdleProducerGroup, _UNASKED, {"name": CHECK_BACK, "interval": _DEFAULT_INTERVAL_SECONDS})
