"""The sequencer's statements.

New decisions are read by snapshot: those whose transaction the last tick could not see. Its upper end and its
running transactions are bound as values; as functions inside one OR they would cost a scan of the whole table.
"""

from __future__ import annotations

from typing import Final

from outbox.broker.database.statement import Statement

# Planning a tick takes longer than running it, so it is planned once: with bound values, without sequential scans
# and with the log behind OFFSET 0, the plan that reads only what is new is the only one there is.
# `local`: for one transaction only, where a pooler would pass the settings on to others.
SETTINGS: Final = Statement("""
SELECT set_config('plan_cache_mode', 'force_generic_plan', %(local)s), set_config('enable_seqscan', 'off', %(local)s),
       set_config('jit', 'off', %(local)s), set_config('enable_mergejoin', 'off', %(local)s),
       set_config('default_transaction_isolation', 'read committed', %(local)s),
       set_config('idle_in_transaction_session_timeout', '5s', %(local)s)
""")

BEGIN: Final = b"BEGIN ISOLATION LEVEL READ COMMITTED"
BEGIN_REPEATABLE: Final = b"BEGIN ISOLATION LEVEL REPEATABLE READ"
COMMIT: Final = b"COMMIT"
ROLLBACK: Final = b"ROLLBACK"

# One tick. One statement has one snapshot, so it is as consistent as a transaction of several.
#
# newest:   nobody ticked meanwhile (a tick committed after this snapshot collides on the primary key instead).
# edge:     where a long backlog is cut; the stored snapshot then says that everything from there on is unread.
# unread:   FIFO half rows that the caller has not looked at, or decided FIFO messages while others are beyond the cut;
#           then nothing is done and the caller looks first.
# moved:    the new heads; all heads in a full tick, so that the ticks before it can be pruned.
# hold:     decided messages the caller found to be behind an undecided one of their key.
# release:  held ones the caller found to be free.
# (A comparison with a bound array is linear in a generic plan; with unnest() it is hashed.)
TICK: Final = Statement("""
WITH newest AS MATERIALIZED (
    SELECT (SELECT max(tick_id) FROM {schema}.tick) = %(tick_id)s AS ok
), edge AS MATERIALIZED (
    SELECT coalesce(
        min(xid) FILTER (WHERE earlier >= %(batch)s),
        CASE WHEN sum(rows) > %(batch)s THEN
            (SELECT min(next.xid) FROM {schema}.op_log next WHERE next.xid > max(per_xid.xid)
                AND next.xid < pg_snapshot_xmax(pg_current_snapshot())) END,
        pg_snapshot_xmax(pg_current_snapshot())) AS cut
    FROM (
        SELECT xid, count(*) AS rows, sum(sum(messages)) OVER (ORDER BY xid) - sum(messages) AS earlier
        FROM (SELECT xid, cardinality(log_ids) AS messages FROM {schema}.op_log
              WHERE xid >= %(xmax)s::xid8 AND xid < pg_snapshot_xmax(pg_current_snapshot())
              ORDER BY xid LIMIT %(batch)s + 1) first
        GROUP BY xid
    ) per_xid
), fresh AS MATERIALIZED (
    SELECT decision, log_ids FROM {schema}.op_log
    WHERE (SELECT ok FROM newest) AND xid >= %(xmax)s::xid8 AND xid < (SELECT cut FROM edge)
    UNION ALL
    SELECT decision, log_ids FROM {schema}.op_log
    WHERE (SELECT ok FROM newest) AND xid = ANY (%(xip)s::xid8[])
), looked_up AS MATERIALIZED (
    SELECT decision, log.*
    FROM fresh CROSS JOIN LATERAL unnest(log_ids) AS one (log_id)
    CROSS JOIN LATERAL (SELECT log_id, topic_id, coalesce(shard, log_id) AS shard, key, deliver_at
                        FROM {schema}.commit_log WHERE log_id = one.log_id OFFSET 0) AS log
), fifo_topic AS MATERIALIZED (
    SELECT topic_id FROM {schema}.topic WHERE 'FIFO' = ANY (message_types)
), unread AS MATERIALIZED (
    SELECT NOT %(fifo_read)s
       AND EXISTS (SELECT FROM fifo_topic)
       AND ((SELECT cut FROM edge) < pg_snapshot_xmax(pg_current_snapshot())
            AND EXISTS (SELECT FROM looked_up WHERE topic_id IN (SELECT topic_id FROM fifo_topic))
         OR EXISTS (SELECT FROM {schema}.commit_log log
                    WHERE half AND log.xid >= %(half_xmax)s::xid8 AND log.xid < pg_snapshot_xmax(pg_current_snapshot())
                      AND deliver_at IS NULL AND topic_id IN (SELECT topic_id FROM fifo_topic))
         OR EXISTS (SELECT FROM {schema}.commit_log log
                    WHERE half AND log.xid = ANY (%(half_xip)s::xid8[])
                      AND deliver_at IS NULL AND topic_id IN (SELECT topic_id FROM fifo_topic))) AS fifo
), gate AS MATERIALIZED (
    SELECT newest.ok AND NOT unread.fifo AS open FROM newest, unread
), decided AS MATERIALIZED (
    SELECT log_id, topic_id, shard, key, deliver_at FROM looked_up
    WHERE decision = 'C' AND (SELECT open FROM gate)
), due AS (
    DELETE FROM {schema}.scheduled
    WHERE schedule_id = ANY (ARRAY(
        SELECT schedule_id FROM {schema}.scheduled WHERE due_at <= now() AND (SELECT open FROM gate)
        ORDER BY due_at, schedule_id LIMIT %(batch)s))
    RETURNING log_id, queue_id, attempt
), released AS (
    DELETE FROM {schema}.held
    WHERE log_id = ANY (%(release)s::bigint[]) AND (SELECT open FROM gate)
    RETURNING log_id
), ready AS MATERIALIZED (
    SELECT log_id, topic_id, shard, key FROM decided WHERE deliver_at IS NULL OR deliver_at <= now()
    UNION ALL
    SELECT log.*
    FROM (SELECT log_id FROM due WHERE queue_id IS NULL UNION ALL SELECT log_id FROM released) AS late
    CROSS JOIN LATERAL (SELECT log_id, topic_id, coalesce(shard, log_id), key
                        FROM {schema}.commit_log WHERE log_id = late.log_id OFFSET 0) AS log
), held_back AS (
    INSERT INTO {schema}.held (log_id, topic_id, key)
    SELECT log_id, topic_id, key FROM ready WHERE log_id IN (SELECT unnest(%(hold)s::bigint[]))
    RETURNING 1
), postponed AS (
    INSERT INTO {schema}.scheduled (log_id, due_at)
    SELECT log_id, deliver_at FROM decided WHERE deliver_at > now()
    ON CONFLICT DO NOTHING
    RETURNING 1
), placed AS (
    SELECT ready.log_id, queue.queue_id, 0::smallint AS attempt
    FROM ready
    JOIN {schema}.topic USING (topic_id)
    JOIN {schema}.queue ON queue.topic_id = topic.topic_id AND queue.generation = topic.generation
                       AND queue.number = (ready.shard %% topic.queue_count)::integer
    WHERE ready.log_id NOT IN (SELECT unnest(%(hold)s::bigint[]))
    UNION ALL
    SELECT log_id, queue_id, attempt FROM due WHERE queue_id IS NOT NULL
), numbered AS MATERIALIZED (
    SELECT coalesce((%(heads)s::bigint[])[queue_id], 0)
               + row_number() OVER (PARTITION BY queue_id ORDER BY log_id, attempt) - 1 AS queue_offset,
           log_id, queue_id, attempt
    FROM placed
), appended AS (
    INSERT INTO {schema}.consume_queue (queue_offset, log_id, queue_id, attempt)
    SELECT queue_offset, log_id, queue_id, attempt FROM numbered
), closed AS (
    UPDATE {schema}.queue SET closing = false, closed_at = coalesce((%(heads)s::bigint[])[queue_id], 0)
    WHERE closing AND (SELECT open FROM gate)
    RETURNING queue_id
), moved AS MATERIALIZED (
    SELECT coalesce(array_agg(queue_id), '{{}}') AS queue_ids, coalesce(array_agg(head), '{{}}') AS heads
    FROM (SELECT queue_id, max(queue_offset) + 1 AS head FROM numbered GROUP BY queue_id
          UNION ALL
          SELECT number, (%(heads)s::bigint[])[number]
          FROM generate_series(1, CASE WHEN %(is_full)s THEN cardinality(%(heads)s::bigint[]) ELSE 0 END) AS number
          WHERE (%(heads)s::bigint[])[number] > 0 AND number NOT IN (SELECT queue_id FROM numbered)) AS written
), counted AS MATERIALIZED (
    SELECT (SELECT count(*) FROM fresh WHERE (SELECT open FROM gate)) AS decisions,
           (SELECT count(*) FROM numbered) AS appended,
           (SELECT count(*) FROM held_back) AS held, (SELECT count(*) FROM released) AS released,
           (SELECT count(*) FROM postponed) AS scheduled, (SELECT count(*) FROM due) AS due,
           (SELECT count(*) FROM closed) AS closed
), ticked AS (
    INSERT INTO {schema}.tick (tick_id, snapshot, incarnation, appended, queue_ids, heads, is_full)
    SELECT %(tick_id)s + 1,
           (least(pg_snapshot_xmin(pg_current_snapshot()), cut)::text || ':' || cut::text || ':' ||
            coalesce((SELECT string_agg(xip::text, ',' ORDER BY xip)
                      FROM pg_snapshot_xip(pg_current_snapshot()) AS xip WHERE xip < cut), ''))::pg_snapshot,
           %(incarnation)s, counted.appended, moved.queue_ids, moved.heads, %(is_full)s
    FROM edge, counted, moved
    WHERE decisions + due + released + closed + counted.held > 0
    RETURNING snapshot::text
)
SELECT newest.ok, unread.fifo, pg_current_snapshot()::text, (SELECT snapshot FROM ticked),
       edge.cut < pg_snapshot_xmax(pg_current_snapshot()) OR counted.due = %(batch)s,
       counted.decisions, counted.appended, counted.held, counted.released, counted.scheduled, counted.due,
       moved.queue_ids, moved.heads,
       extract(epoch FROM least((SELECT min(due_at) FROM {schema}.scheduled WHERE due_at > now()),
                                (SELECT min(deliver_at) FROM decided WHERE deliver_at > now()))
                          - now())::double precision
FROM newest, unread, edge, counted, moved
""")

# Which FIFO messages the next tick will meet, in the same snapshot: rows (what, log_id, topic_id, key, transaction_id).
#   h: a half row that became visible   c, r: a message decided COMMIT (and due now) or ROLLBACK   d: a due delayed one
READ_FIFO: Final = Statement("""
WITH edge AS MATERIALIZED (
    SELECT coalesce(
        min(xid) FILTER (WHERE earlier >= %(batch)s),
        CASE WHEN sum(rows) > %(batch)s THEN
            (SELECT min(next.xid) FROM {schema}.op_log next WHERE next.xid > max(per_xid.xid)
                AND next.xid < pg_snapshot_xmax(pg_current_snapshot())) END,
        pg_snapshot_xmax(pg_current_snapshot())) AS cut
    FROM (
        SELECT xid, count(*) AS rows, sum(sum(messages)) OVER (ORDER BY xid) - sum(messages) AS earlier
        FROM (SELECT xid, cardinality(log_ids) AS messages FROM {schema}.op_log
              WHERE xid >= %(xmax)s::xid8 AND xid < pg_snapshot_xmax(pg_current_snapshot())
              ORDER BY xid LIMIT %(batch)s + 1) first
        GROUP BY xid
    ) per_xid
), fifo AS MATERIALIZED (
    SELECT topic_id FROM {schema}.topic WHERE 'FIFO' = ANY (message_types)
), fresh AS (
    SELECT decision, log_ids FROM {schema}.op_log
    WHERE xid >= %(xmax)s::xid8 AND xid < (SELECT cut FROM edge)
    UNION ALL
    SELECT decision, log_ids FROM {schema}.op_log WHERE xid = ANY (%(xip)s::xid8[])
), due AS (
    SELECT log_id, queue_id FROM {schema}.scheduled WHERE due_at <= now()
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
  -- Decided and read already, and met only now because its transaction id comes from before a restore.
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

CURRENT_SNAPSHOT: Final = Statement("SELECT pg_current_snapshot()::text")

# Of these half transactions: the parked ones, whose topics let later messages of the key go on.
RELEASED_BY_PARKING: Final = Statement("""
SELECT log.log_id
FROM {schema}.pending_check pending
JOIN {schema}.commit_log first ON first.log_id = pending.log_id
JOIN {schema}.commit_log log ON log.half AND log.xid = first.xid AND log.transaction_id = pending.transaction_id
JOIN {schema}.topic ON topic.topic_id = log.topic_id
WHERE pending.transaction_id = ANY (%(ids)s::uuid[]) AND parked_at IS NOT NULL AND on_park = 'release'
""")

# -- taking over ------------------------------------------------------------------------------------------

TICKS: Final = Statement("""
SELECT tick_id, snapshot::text, queue_ids, heads FROM {schema}.tick
WHERE tick_id >= (SELECT max(tick_id) FROM {schema}.tick WHERE is_full) ORDER BY tick_id
""")

# A row that is visible has an id below the snapshot's end, unless another server gave it.
BROKER: Final = Statement("""
SELECT incarnation, system_identifier, timeline, pg_current_snapshot()::text,
       (SELECT snapshot::text FROM {schema}.half_scan ORDER BY scan_id DESC LIMIT 1),
       EXISTS (SELECT FROM {schema}.topic WHERE 'FIFO' = ANY (message_types)),
       EXISTS (SELECT FROM {schema}.resync WHERE resync.incarnation = broker.incarnation),
       EXISTS (SELECT FROM {schema}.op_log WHERE xid >= pg_snapshot_xmax(pg_current_snapshot()))
FROM {schema}.broker
""")

HELD: Final = Statement("SELECT log_id, topic_id, key FROM {schema}.held")

# Open: visible, FIFO, not delayed, and without a decision that the last tick has read. Candidates are the half rows
# the scan found undecided, those it has not read, and all rows decided since the last tick.
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

# -- transaction ids started over ---------------------------------------------------------------------------

RAISE_INCARNATION: Final = Statement("""
UPDATE {schema}.broker SET incarnation = incarnation + 1, system_identifier = %(system_identifier)s,
    timeline = %(timeline)s
RETURNING incarnation
""")

# By log id, not by transaction id: what was committed and is nowhere is held, and released by the next tick.
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

# Ids that another server gave, of decisions compared above: visible, though by its id the snapshot could not see it.
# Out of the way, or they would be read again when this server's ids get there. 2 is PostgreSQL's own "frozen". After a
# failover or a physical restore ids go on and there are none; after a logical one nearly all rows are such.
FREEZE_FOREIGN: Final = Statement("""
UPDATE {schema}.op_log SET xid = '2'
WHERE xid >= pg_snapshot_xmin(pg_current_snapshot()) AND NOT pg_visible_in_snapshot(xid, pg_current_snapshot())
""")

RECORD_RESYNC: Final = Statement("""
INSERT INTO {schema}.resync (incarnation, reason, snapshot)
VALUES (%(incarnation)s, %(reason)s, pg_current_snapshot())
""")

# The half scan starts anew above the current snapshot; what is undecided now becomes pending here.
RESET_HALF_SCAN: Final = Statement("""
WITH moved AS (
    INSERT INTO {schema}.pending_check (transaction_id, log_id, producer_group, stored_at, immune_until, due_at)
    SELECT transaction_id, log_id, coalesce(producer_group, ''), stored_at,
           stored_at + make_interval(secs => coalesce(immunity_seconds, %(immunity)s)),
           stored_at + make_interval(secs => coalesce(immunity_seconds, %(immunity)s))
    FROM {schema}.commit_log log
    WHERE half AND message_id = transaction_id
      AND NOT EXISTS (SELECT FROM {schema}.op_log op WHERE op.transaction_id = log.transaction_id)
    ON CONFLICT (transaction_id) DO NOTHING
    RETURNING 1
)
INSERT INTO {schema}.half_scan (scan_id, snapshot, moved)
SELECT (SELECT max(scan_id) + 1 FROM {schema}.half_scan), pg_current_snapshot(), (SELECT count(*) FROM moved)
""")

RESYNC_TICK: Final = Statement("""
INSERT INTO {schema}.tick (tick_id, snapshot, incarnation, appended, queue_ids, heads, is_full)
VALUES (%(tick_id)s + 1, pg_current_snapshot(), %(incarnation)s, 0, %(queue_ids)s::integer[], %(heads)s::bigint[], true)
""")
