"""Statements for a takeover from the stored tick, and for the comparison after transaction ids started over."""

from __future__ import annotations

from typing import Final

from outbox.broker.database.statement import Statement
from outbox.broker.transaction.pending import insert_pending

LAST_TICK: Final = Statement("SELECT tick_id, snapshot::text FROM {schema}.tick ORDER BY tick_id DESC LIMIT 1")

# A visible row has an id below the snapshot's end, unless another server gave the id.
BROKER: Final = Statement("""
SELECT incarnation, system_identifier, timeline, pg_current_snapshot()::text AS snapshot,
       (SELECT snapshot::text FROM {schema}.half_scan ORDER BY scan_id DESC LIMIT 1) AS half_scan,
       ARRAY(SELECT topic_id FROM {schema}.topic WHERE 'FIFO' = ANY (message_types) ORDER BY topic_id) AS fifo_topics,
       EXISTS (SELECT FROM {schema}.resync WHERE resync.incarnation = broker.incarnation) AS is_compared,
       EXISTS (SELECT FROM {schema}.op_log WHERE xid >= pg_snapshot_xmax(pg_current_snapshot())) AS has_foreign_ids,
       EXISTS (SELECT FROM {schema}.life WHERE is_copy
               AND ordinal > (SELECT max(life_ordinal) FROM {schema}.resync)) AS is_copy
FROM {schema}.broker
""")

HELD: Final = Statement("SELECT log_id, topic_id, key FROM {schema}.held")

# Open: visible, FIFO, not delayed, and without a decision that the last tick has read. Candidates are the half rows
# that the scan found undecided, those that it has not read, and all rows decided since the last tick.
OPEN_HALVES: Final = Statement("""
WITH candidate AS (
    SELECT log.log_id, pending.parked_at
    FROM {schema}.pending_check pending
    JOIN {schema}.commit_log first ON first.log_id = pending.log_id
    JOIN {schema}.commit_log log ON log.half AND log.xid = first.xid AND log.transaction_id = pending.transaction_id
    UNION
    SELECT log_id, NULL FROM {schema}.commit_log
    WHERE half AND xid >= %(scan_xmax)s::xid8 AND xid < pg_snapshot_xmax(pg_current_snapshot())
    UNION
    SELECT log_id, NULL FROM {schema}.commit_log WHERE half AND xid = ANY (%(scan_xip)s::xid8[])
    UNION
    SELECT unnest(log_ids), NULL FROM {schema}.op_log WHERE xid >= %(xmax)s::xid8
    UNION
    SELECT unnest(log_ids), NULL FROM {schema}.op_log WHERE xid = ANY (%(xip)s::xid8[])
)
SELECT log.log_id, log.topic_id, log.key, log.transaction_id
FROM (SELECT log_id, max(parked_at) AS parked_at FROM candidate GROUP BY log_id) AS one
JOIN {schema}.commit_log log USING (log_id)
JOIN {schema}.topic USING (topic_id)
WHERE log.deliver_at IS NULL AND 'FIFO' = ANY (message_types)
  AND NOT (on_park = 'release' AND parked_at IS NOT NULL)
  AND NOT EXISTS (
      SELECT FROM {schema}.op_log op
      WHERE op.transaction_id = log.transaction_id AND pg_visible_in_snapshot(op.xid, %(snapshot)s::pg_snapshot))
""")

# -- after transaction ids started over -------------------------------------------------------------------------

RAISE_INCARNATION: Final = Statement("""
UPDATE {schema}.broker SET incarnation = incarnation + 1, system_identifier = %(system_identifier)s,
    timeline = %(timeline)s
RETURNING incarnation
""")

# By log id, not by transaction id: a committed message that is in no queue becomes held, and the next tick releases it.
HOLD_LOST: Final = Statement("""
WITH lost AS (
    SELECT log.log_id, log.topic_id, log.key, log.deliver_at
    FROM (SELECT unnest(log_ids) AS log_id FROM {schema}.op_log WHERE decision = 'C') AS decided
    JOIN {schema}.commit_log log USING (log_id)
    WHERE NOT EXISTS (SELECT FROM {schema}.consume_queue entry WHERE entry.log_id = log.log_id)
      AND NOT EXISTS (SELECT FROM {schema}.scheduled WHERE scheduled.log_id = log.log_id)
      AND NOT EXISTS (SELECT FROM {schema}.held WHERE held.log_id = log.log_id)
      AND NOT EXISTS (SELECT FROM {schema}.recalled WHERE recalled.log_id = log.log_id)
), later AS (
    INSERT INTO {schema}.scheduled (log_id, due_at) SELECT log_id, deliver_at FROM lost WHERE deliver_at > now()
    ON CONFLICT DO NOTHING
)
INSERT INTO {schema}.held (log_id, topic_id, key)
SELECT log_id, topic_id, key FROM lost WHERE deliver_at IS NULL OR deliver_at <= now()
""")

# Transaction ids of decisions compared above that another server gave: their rows are visible although, by its id, the
# snapshot could not see them. Replace these ids, or the rows would be read again when this server's ids reach them. 2
# is PostgreSQL's own "frozen". After a failover or a physical restore ids continue and there are none. After a logical
# restore nearly all rows have such ids.
FREEZE_FOREIGN: Final = Statement("""
UPDATE {schema}.op_log SET xid = '2'
WHERE xid >= pg_snapshot_xmin(pg_current_snapshot()) AND NOT pg_visible_in_snapshot(xid, pg_current_snapshot())
""")

RECORD_RESYNC: Final = Statement("""
INSERT INTO {schema}.resync (incarnation, reason, snapshot, life_ordinal)
VALUES (%(incarnation)s, %(reason)s, pg_current_snapshot(), (SELECT coalesce(max(ordinal), 0) FROM {schema}.life))
""")

# The half scan starts anew above the current snapshot; transactions that are undecided now become pending here.
RESET_HALF_SCAN: Final = Statement(
    f"""
WITH moved AS ({insert_pending("{schema}.commit_log AS half_row", "half AND message_id = transaction_id")}
    ON CONFLICT (transaction_id) DO NOTHING
    RETURNING 1
)
INSERT INTO {{schema}}.half_scan (scan_id, snapshot, moved)
SELECT (SELECT max(scan_id) + 1 FROM {{schema}}.half_scan), pg_current_snapshot(), (SELECT count(*) FROM moved)
"""
)

RESYNC_TICK: Final = Statement("""
INSERT INTO {schema}.tick (tick_id, snapshot, incarnation, appended, queue_ids, heads, is_full)
SELECT %(tick_id)s + 1, pg_current_snapshot(), %(incarnation)s, 0, coalesce(array_agg(queue_id), '{{}}'),
       coalesce(array_agg(head), '{{}}'), true
FROM {schema}.queue_head WHERE head > 0
""")
