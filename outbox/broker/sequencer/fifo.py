"""Which FIFO messages the next tick must hold or release: the statements that read them, and the plan made of them.

Only a tick that meets FIFO messages needs this (see `Sequencer._tick_in_order` in outbox/broker/leading.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Final, TypeAlias
from uuid import UUID

from outbox.broker.database.arrays import uuids
from outbox.broker.database.executor import Executor
from outbox.broker.database.statement import Statement
from outbox.broker.sequencer.key_order import KeyOrder
from outbox.broker.sequencer.takeover import TickState

# Two processes may park transactions at the same time. The transaction that commits later may have the earlier
# `parked_at`, and a search for newer times would miss its row. So the sequencer reads all parked transactions at this
# interval (seconds).
LOOK_AT_ALL_PARKED_SECONDS: Final = 10.0

# Reads the FIFO messages that the next tick will find in the same snapshot, as rows (what, log_id, topic_id, key,
# transaction_id).
#   h: a half row that became visible   c, r: a message decided COMMIT (and due now) or ROLLBACK
#   d: a delayed message that is due
READ_FIFO: Final = Statement("""
WITH edge AS MATERIALIZED (
    SELECT {schema}.decisions_cut(%(xmax)s::xid8, %(batch)s::bigint) AS cut
), fifo AS MATERIALIZED (
    SELECT topic_id FROM {schema}.topic WHERE 'FIFO' = ANY (message_types)
), fresh AS (
    SELECT decision, log_ids FROM {schema}.op_log
    WHERE xid >= %(xmax)s::xid8 AND xid < (SELECT cut FROM edge)
    UNION ALL
    SELECT decision, log_ids FROM {schema}.op_log WHERE xid = ANY (%(xip)s::xid8[])
), due AS (
    SELECT log_id, queue_id FROM {schema}.scheduled WHERE due_at >= %(due_from)s AND due_at <= now()
    ORDER BY due_at, schedule_id LIMIT %(batch)s
), half AS (
    SELECT * FROM {schema}.commit_log
    WHERE half AND xid >= %(half_xmax)s::xid8 AND xid < pg_snapshot_xmax(pg_current_snapshot())
    UNION ALL
    SELECT * FROM {schema}.commit_log WHERE half AND xid = ANY (%(half_xip)s::xid8[])
), beyond AS (
    SELECT log_ids FROM {schema}.op_log
    WHERE xid >= greatest((SELECT cut FROM edge), %(half_xmax)s::xid8) AND xid < pg_snapshot_xmax(pg_current_snapshot())
      AND decision = 'C'
    UNION ALL
    SELECT log_ids FROM {schema}.op_log
    WHERE xid = ANY (%(half_xip)s::xid8[]) AND xid >= (SELECT cut FROM edge) AND decision = 'C'
)
SELECT 'h', log_id, topic_id, key, transaction_id FROM half JOIN fifo USING (topic_id)
WHERE deliver_at IS NULL
  -- It was decided and read already, and appears only now because its transaction id comes from before a restore.
  AND NOT EXISTS (SELECT FROM {schema}.op_log op
                  WHERE op.transaction_id = half.transaction_id
                    AND pg_visible_in_snapshot(op.xid, %(snapshot)s::pg_snapshot))
UNION ALL
SELECT 'h', log.log_id, topic_id, key, transaction_id
FROM beyond CROSS JOIN LATERAL unnest(log_ids) AS one (log_id)
CROSS JOIN LATERAL (SELECT * FROM {schema}.commit_log WHERE log_id = one.log_id AND NOT half OFFSET 0) AS log
JOIN fifo USING (topic_id)
WHERE deliver_at IS NULL
UNION ALL
SELECT CASE decision WHEN 'C' THEN 'c' ELSE 'r' END, log.log_id, topic_id, key, NULL
FROM fresh CROSS JOIN LATERAL unnest(log_ids) AS one (log_id)
CROSS JOIN LATERAL (SELECT * FROM {schema}.commit_log WHERE log_id = one.log_id OFFSET 0) AS log
JOIN fifo USING (topic_id)
WHERE decision = 'R' OR deliver_at IS NULL OR deliver_at <= now()
UNION ALL
SELECT 'd', log.log_id, topic_id, key, NULL
FROM due CROSS JOIN LATERAL (SELECT * FROM {schema}.commit_log WHERE log_id = due.log_id OFFSET 0) AS log
JOIN fifo USING (topic_id)
WHERE due.queue_id IS NULL
""")

# The newest `parked_at` of all transactions that are parked now.
NEWEST_PARKED: Final = Statement("SELECT max(parked_at) FROM {schema}.pending_check WHERE parked_at IS NOT NULL")

# Finds the messages of transactions that were parked since `since`, and of the parked transactions in `ids`. Returns
# only messages on topics where a parked message does not block its key.
_RELEASED_BY_PARKING: Final = Statement("""
WITH pending AS (
    SELECT transaction_id, log_id FROM {schema}.pending_check
    WHERE parked_at IS NOT NULL AND parked_at >= %(since)s::timestamptz
    UNION
    SELECT transaction_id, log_id FROM {schema}.pending_check
    WHERE parked_at IS NOT NULL AND transaction_id = ANY (%(ids)s::uuid[])
)
SELECT log.log_id
FROM pending
CROSS JOIN LATERAL (SELECT xid FROM {schema}.commit_log WHERE log_id = pending.log_id OFFSET 0) AS first
CROSS JOIN LATERAL (SELECT log_id, topic_id FROM {schema}.commit_log
                    WHERE half AND xid = first.xid AND transaction_id = pending.transaction_id OFFSET 0) AS log
JOIN {schema}.topic ON topic.topic_id = log.topic_id
WHERE on_park = 'release'
""")


@dataclass
class Plan:
    """The FIFO messages that the next tick must hold or release."""

    has_looked: bool = False
    hold: list[int] = field(default_factory=list)
    release: list[int] = field(default_factory=list)


# A FIFO message that the next tick will find in its snapshot: what, log id, topic id, key, transaction id. The values
# of `what` are listed at READ_FIFO. The transaction id is None unless `what` is "h". A plain tuple, because a tick may
# read thousands of FIFO messages.
Seen: TypeAlias = tuple[str, int, int, str, UUID | None]


def released_by_parking(run: Executor, state: TickState, newest_parked: bytes | None, now: float) -> list[int]:
    """Return the messages that do not block their keys any more, because their transactions were parked.

    `newest_parked`: what NEWEST_PARKED has read. `now`: the time on the clock of the sequencer.
    """
    since = None
    if now >= state.look_at_all_parked_at:
        since, state.look_at_all_parked_at = "-infinity", now + LOOK_AT_ALL_PARKED_SECONDS
    elif newest_parked != state.newest_parked:
        since = "-infinity" if state.newest_parked is None else state.newest_parked.decode()
    state.newest_parked = newest_parked
    blockers = state.order.new_blockers()
    if since is None and not blockers:
        return []
    parameters = {"since": since or "infinity", "ids": uuids(blockers)}
    return [log_id for (log_id,) in run.rows(_RELEASED_BY_PARKING, parameters)]


def plan_of(order: KeyOrder, messages: Sequence[Seen], let_go: list[int], now: float, batch: int) -> Plan:
    """Return which messages the next tick must hold or release. Record them in `order`.

    - `messages`: what READ_FIFO has read.
    - `let_go`: the messages that do not block their keys any more (`released_by_parking`).
    - `now`: the time on the clock of the sequencer.
    - `batch`: how many messages the tick may release.
    """
    for what, log_id, topic_id, key, transaction_id in messages:
        if what == "h" and transaction_id is not None:
            order.open(log_id, (topic_id, key), transaction_id)
    # First add all decisions that this tick reads. Otherwise a message could wait for an earlier message
    # although the same tick reads the decision of that earlier message.
    order.close(log_id for what, log_id, *_ in messages if what in "cr")
    order.close(let_go)
    plan = Plan(has_looked=True, release=order.release(batch))
    if order.is_idle:
        return plan
    # Process the messages in the order of the log. If a message must wait, the later messages of its key must wait,
    # too.
    for what, log_id, topic_id, key, _ in sorted(messages, key=itemgetter(1)):
        if what in "cd" and order.must_wait(log_id, (topic_id, key)):
            order.hold(log_id, (topic_id, key), now)
            plan.hold.append(log_id)
    return plan
