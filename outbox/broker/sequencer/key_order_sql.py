"""SQL that reads the input for the order of FIFO keys, in the snapshot of the following tick."""

from __future__ import annotations

from typing import Final

from outbox.broker.database.statement import Statement

# Which FIFO messages the next tick will meet, in the same snapshot: rows (what, log_id, topic_id, key, transaction_id).
#   h: a half row that became visible   c, r: a message decided COMMIT (and due now) or ROLLBACK   d: a due delayed one
READ_FIFO: Final = Statement("""
WITH edge AS MATERIALIZED (
    SELECT {schema}.decisions_cut_v13(%(xmax)s::xid8, %(batch)s::bigint) AS cut
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
SELECT CASE decision WHEN 'C' THEN 'c' ELSE 'r' END, log.log_id, topic_id, key, transaction_id
FROM fresh CROSS JOIN LATERAL unnest(log_ids) AS one (log_id)
CROSS JOIN LATERAL (SELECT * FROM {schema}.commit_log WHERE log_id = one.log_id OFFSET 0) AS log
JOIN fifo USING (topic_id)
WHERE decision = 'R' OR deliver_at IS NULL OR deliver_at <= now()
UNION ALL
SELECT 'd', log.log_id, topic_id, key, transaction_id
FROM due CROSS JOIN LATERAL (SELECT * FROM {schema}.commit_log WHERE log_id = due.log_id OFFSET 0) AS log
JOIN fifo USING (topic_id)
WHERE due.queue_id IS NULL
""")

# The last time at which one of the now parked transactions was parked.
NEWEST_PARKED: Final = Statement("SELECT max(parked_at) FROM {schema}.pending_check WHERE parked_at IS NOT NULL")

# Of the transactions parked since then, and of these: the parked ones on topics that let later messages of the key
# pass.
RELEASED_BY_PARKING: Final = Statement("""
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
