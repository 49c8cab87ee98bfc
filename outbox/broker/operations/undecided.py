"""What waits for producers: undecided transactions by producer group, and whether anybody of the group asks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from outbox.broker.database.executor import Executor
from outbox.broker.database.statement import Statement
from outbox.transaction import GROUP_AWAY_SECONDS


@dataclass(frozen=True, slots=True)
class UndecidedGroup:
    """The undecided transactions of one producer group, as far as they are scanned.

    `waiting` are asked about as usual, `overdue` of them have been due for minutes; `parked` counts by reason.
    `example` is the oldest of the parked, or of the overdue ones. Ages in seconds; `seen_seconds`: since the group last
    asked for its checks, None if it never did.
    """

    group: str
    waiting: int
    overdue: int
    parked: dict[str, int]
    oldest_seconds: float
    seen_seconds: float | None
    example: str | None

    def problems(self) -> Iterator[str]:
        """What needs attention, and what to do. Nobody asking is what `turns.unasked` finds."""
        if self.parked:
            reasons = ", ".join(f"{count} {reason}" for reason, count in sorted(self.parked.items()))
            yield (
                f"producer group {self.group!r}: transactions are parked ({reasons}; e.g. {self.example}): "
                f"`outbox_trace ID` shows what was answered, `outbox_check --parked` asks again at once, "
                f"`outbox_decide ID` settles one"
            )


# Cost follows the undecided ones.
_UNDECIDED = Statement("""
WITH undecided AS MATERIALIZED (
    SELECT transaction_id::text AS id, producer_group, stored_at, parked_at IS NOT NULL AS is_parked,
           coalesce(park_reason, 'not known') AS reason,
           parked_at IS NULL AND due_at < now() - make_interval(secs => %(away)s) AS is_overdue
    FROM {schema}.pending_check pending
    WHERE NOT EXISTS (SELECT FROM {schema}.op_log WHERE op_log.transaction_id = pending.transaction_id)
), reasons AS (
    SELECT producer_group, jsonb_object_agg(reason, number) AS parked
    FROM (SELECT producer_group, reason, count(*) AS number FROM undecided WHERE is_parked GROUP BY 1, 2) AS counted
    GROUP BY producer_group
)
SELECT producer_group AS group, count(*) FILTER (WHERE NOT is_parked) AS waiting,
       count(*) FILTER (WHERE is_overdue) AS overdue, coalesce(reasons.parked, '{{}}') AS parked,
       extract(epoch FROM now() - min(stored_at))::double precision AS oldest_seconds,
       extract(epoch FROM now() - max(seen_at))::double precision AS seen_seconds,
       coalesce((array_agg(id ORDER BY stored_at) FILTER (WHERE is_parked))[1],
                (array_agg(id ORDER BY stored_at) FILTER (WHERE is_overdue))[1]) AS example
FROM undecided LEFT JOIN reasons USING (producer_group)
LEFT JOIN {schema}.producer_group asking ON asking.name = producer_group
GROUP BY producer_group, reasons.parked ORDER BY producer_group
""")


def undecided_groups(run: Executor) -> list[UndecidedGroup]:
    """Every producer group that something undecided waits for."""
    return run.objects(UndecidedGroup, _UNDECIDED, {"away": GROUP_AWAY_SECONDS})
