"""The tick: one statement that reads decisions and appends queue entries.

New decisions are read by snapshot: those whose transaction the last tick could not see (log/unread.py).
"""

from __future__ import annotations

from typing import Final

from outbox.broker.database.statement import Statement
from outbox.broker.log import unread
from outbox.broker.log.unread import SNAPSHOT_UP_TO_CUT

# Planning a tick takes longer than running it, so it is planned once: with bound values, without sequential scans
# and with the log behind OFFSET 0, the plan that reads only what is new is the only one there is.
# `local`: for one transaction only, where a pooler would pass the settings on to others.
SETTINGS: Final = """
SELECT set_config('plan_cache_mode', 'force_generic_plan', %(local)s), set_config('enable_seqscan', 'off', %(local)s),
       set_config('jit', 'off', %(local)s), set_config('enable_mergejoin', 'off', %(local)s),
       set_config('default_transaction_isolation', 'read committed', %(local)s),
       set_config('idle_in_transaction_session_timeout', '5s', %(local)s)
"""

BEGIN: Final = b"BEGIN ISOLATION LEVEL READ COMMITTED"
BEGIN_REPEATABLE: Final = b"BEGIN ISOLATION LEVEL REPEATABLE READ"
COMMIT: Final = b"COMMIT"

# The sequencer's cut: the tick and what looks ahead of it must agree on it.
NEW_DECISIONS_CUT: Final = unread.cut("op_log", messages="cardinality(log_ids)")

# One tick. One statement has one snapshot, so it is as consistent as a transaction of several.
#
# newest:   nobody ticked meanwhile (a tick committed after this snapshot collides on the primary key instead).
# known:    the caller knows which topics are FIFO; another set changes which halves are in whose way.
# edge:     where a long backlog is cut; the stored snapshot then says that everything from there on is unread.
# unread:   FIFO half rows that the caller has not looked at, or decided FIFO messages while others are beyond the cut;
#           then nothing is done and the caller looks first.
# moved:    the new heads; all heads in a full tick, so that the ticks before it can be pruned.
# hold:     decided messages the caller found to be behind an undecided one of their key.
# release:  held ones the caller found to be free.
# (A comparison with a bound array is linear in a generic plan; with unnest() it is hashed.)
TICK: Final = Statement(
    """
WITH newest AS MATERIALIZED (
    SELECT (SELECT max(tick_id) FROM {schema}.tick) = %(tick_id)s AS ok
), edge AS MATERIALIZED ("""
    + NEW_DECISIONS_CUT
    + """), fresh AS MATERIALIZED (
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
), known AS MATERIALIZED (
    SELECT coalesce(array_agg(topic_id ORDER BY topic_id), '{{}}') = %(fifo_topics)s::integer[] AS fifo
    FROM fifo_topic
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
    SELECT newest.ok AND known.fifo AND NOT unread.fifo AS open FROM newest, known, unread
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
    SELECT %(tick_id)s + 1, """
    + SNAPSHOT_UP_TO_CUT
    + """,
           %(incarnation)s, counted.appended, moved.queue_ids, moved.heads, %(is_full)s
    FROM edge, counted, moved
    WHERE decisions + due + released + closed + counted.held > 0
    RETURNING snapshot::text
)
SELECT newest.ok, known.fifo, unread.fifo, pg_current_snapshot()::text, (SELECT snapshot FROM ticked),
       edge.cut < pg_snapshot_xmax(pg_current_snapshot()) OR counted.due = %(batch)s,
       counted.decisions, counted.appended, counted.held, counted.released, counted.scheduled, counted.due,
       moved.queue_ids, moved.heads,
       extract(epoch FROM least((SELECT min(due_at) FROM {schema}.scheduled WHERE due_at > now()),
                                (SELECT min(deliver_at) FROM decided WHERE deliver_at > now()))
                          - now())::double precision
FROM newest, known, unread, edge, counted, moved
"""
)
