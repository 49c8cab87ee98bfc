"""The counts of the status report. Each term is counted from its own rows, never as the rest of another."""

from __future__ import annotations

from typing import Final

from outbox.broker.database.statement import Statement

BROKER: Final = Statement("""
SELECT broker_id::text, incarnation, reject_transactional,
       (SELECT max(change) FROM {schema}.schema_version) AS schema_version,
       (SELECT max(tick_id) FROM {schema}.tick) AS last_tick,
       (SELECT extract(epoch FROM now() - at)::double precision
        FROM {schema}.tick ORDER BY tick_id DESC LIMIT 1) AS last_tick_age_seconds,
       (SELECT owner::text FROM {schema}.leader_lease
        WHERE role = 'sequencer' AND expires_at > clock_timestamp()) AS leader,
       (SELECT extract(epoch FROM now() - min(stored_at))::double precision FROM {schema}.pending_check
        WHERE parked_at IS NULL
          AND NOT EXISTS (SELECT FROM {schema}.op_log WHERE op_log.transaction_id = pending_check.transaction_id))
           AS oldest_pending_seconds,
       (SELECT count(*) FROM {schema}.incident WHERE at > now() - interval '1 day') AS incidents_last_day,
       (SELECT snapshot::text FROM {schema}.tick ORDER BY tick_id DESC LIMIT 1) AS snapshot
FROM {schema}.broker
""")

# Publishing transactions (they hold a lock on op_log) that were in progress when the broker last resynchronised. Every
# role sees locks. Without pg_read_all_stats, PostgreSQL shows neither state nor age of another role's session.
OPEN_SINCE_RESYNC: Final = Statement("""
SELECT CASE WHEN written.pid IS NOT NULL THEN 'session ' || written.pid
            ELSE 'prepared transaction ' || coalesce(quote_literal(prepared.gid), held.transactionid::text) END AS who,
       coalesce(application_name, '') AS application,
       CASE WHEN written.pid IS NULL THEN 'prepared'
            ELSE coalesce(activity.state, 'not visible to this role') END AS state,
       extract(epoch FROM clock_timestamp() - coalesce(prepared.prepared, activity.xact_start))::double precision
           AS age_seconds
FROM pg_locks written
JOIN pg_locks held ON held.locktype = 'transactionid' AND held.granted AND held.mode = 'ExclusiveLock'
    AND held.virtualtransaction = written.virtualtransaction AND held.pid IS NOT DISTINCT FROM written.pid
LEFT JOIN pg_stat_activity activity ON activity.pid = written.pid
LEFT JOIN pg_prepared_xacts prepared ON written.pid IS NULL AND prepared.transaction = held.transactionid
WHERE written.relation = '{schema}.op_log'::regclass AND written.mode = 'RowExclusiveLock'
  AND written.database = (SELECT oid FROM pg_database WHERE datname = current_database())
  -- Its savepoints' locks are not in the snapshot.
  AND held.transactionid IN (
      SELECT pg_snapshot_xip(snapshot)::xid
      FROM {schema}.resync WHERE incarnation = (SELECT max(incarnation) FROM {schema}.resync))
ORDER BY age_seconds DESC NULLS LAST
""")

TOPICS: Final = Statement("""
SELECT topic_id, name, message_types, queue_count, generation, retention_seconds
FROM {schema}.topic WHERE retry_of IS NULL ORDER BY name
""")

# One row per topic and term. `sent` counts log rows. `committed` and `rolled back` count what decisions list.
# `unsequenced` counts decisions that the last tick could not see. The other terms count rows of the table of that name.
TERMS: Final = Statement("""
WITH decided AS MATERIALIZED (
    SELECT log.topic_id, op.decision,
           NOT pg_visible_in_snapshot(op.xid, %(snapshot)s::pg_snapshot) AS unread
    FROM {schema}.op_log op CROSS JOIN LATERAL unnest(op.log_ids) AS one (log_id)
    JOIN {schema}.commit_log log USING (log_id)
), open AS MATERIALIZED (
    SELECT log.topic_id, pending.parked_at IS NOT NULL AS parked
    FROM {schema}.commit_log log LEFT JOIN {schema}.pending_check pending USING (transaction_id)
    WHERE half AND NOT EXISTS (SELECT FROM {schema}.op_log op WHERE op.transaction_id = log.transaction_id)
)
SELECT topic_id, 'sent', count(*) FROM {schema}.commit_log GROUP BY topic_id
UNION ALL SELECT topic_id, 'committed', count(*) FROM decided WHERE decision = 'C' GROUP BY topic_id
UNION ALL SELECT topic_id, 'rolled_back', count(*) FROM decided WHERE decision = 'R' GROUP BY topic_id
UNION ALL SELECT topic_id, 'unsequenced', count(*) FROM decided WHERE decision = 'C' AND unread GROUP BY topic_id
UNION ALL SELECT topic_id, 'undecided', count(*) FROM open WHERE NOT parked GROUP BY topic_id
UNION ALL SELECT topic_id, 'parked', count(*) FROM open WHERE parked GROUP BY topic_id
UNION ALL SELECT topic_id, 'held', count(*) FROM {schema}.held GROUP BY topic_id
UNION ALL
SELECT topic_id, 'scheduled', count(*)
FROM {schema}.scheduled JOIN {schema}.commit_log USING (log_id) WHERE queue_id IS NULL GROUP BY topic_id
UNION ALL
SELECT topic_id, 'recalled', count(*) FROM {schema}.recalled JOIN {schema}.commit_log USING (log_id) GROUP BY topic_id
UNION ALL
SELECT topic_id, 'queued', count(*)
FROM {schema}.consume_queue JOIN {schema}.queue USING (queue_id) JOIN {schema}.topic USING (topic_id)
WHERE retry_of IS NULL GROUP BY topic_id
UNION ALL
SELECT topic_id, term, sum(pruned)
FROM {schema}.pruned CROSS JOIN LATERAL (VALUES ('sent', sent), ('committed', committed),
    ('rolled_back', rolled_back), ('recalled', recalled), ('queued', queued)) AS terms (term, pruned)
GROUP BY topic_id, term
""")

# Per group and topic. `queued` comes from the heads that ticks carry and from the group's start. `lag` counts entries.
# The retry queue's part of a topic is what came from there, so retries are counted by the message's topic. `missed`:
# messages removed by retention before a group's position; the group counts them when its consumers return.
GROUPS: Final = Statement("""
WITH heads AS MATERIALIZED (
    SELECT DISTINCT ON (queue_id) queue_id, head
    FROM {schema}.tick CROSS JOIN LATERAL unnest(queue_ids, heads) AS moved (queue_id, head)
    WHERE tick_id >= (SELECT max(tick_id) FROM {schema}.tick WHERE is_full)
    ORDER BY queue_id, tick_id DESC
), place AS (
    SELECT group_id, topic_id, false AS is_retry FROM {schema}.subscription
    UNION ALL
    SELECT retry_of, topic_id, true FROM {schema}.topic WHERE retry_of IS NOT NULL
), counted AS (
    SELECT place.group_id, place.is_retry, coalesce(heads.head, 0) AS head, newest.*,
           greatest(0, queue.floor - newest.next_offset) AS missed,
           (SELECT count(*) FROM {schema}.consume_queue entry
            WHERE entry.queue_id = queue.queue_id
              AND entry.queue_offset >= greatest(newest.next_offset, queue.floor)) AS waiting,
           (SELECT count(*) FROM {schema}.scheduled WHERE scheduled.queue_id = queue.queue_id) AS scheduled
    FROM place JOIN {schema}.queue USING (topic_id)
    LEFT JOIN heads USING (queue_id)
    CROSS JOIN LATERAL (
        SELECT start_offset, next_offset, handled, filtered, skipped, expired, moved
        FROM (SELECT * FROM {schema}.consumer_offset stored
              WHERE stored.group_id = place.group_id AND stored.queue_id = queue.queue_id
              ORDER BY epoch DESC, ordinal DESC LIMIT 1) AS stored
        UNION ALL
        SELECT 0, 0, 0, 0, 0, 0, 0
        WHERE NOT EXISTS (SELECT FROM {schema}.consumer_offset stored
                          WHERE stored.group_id = place.group_id AND stored.queue_id = queue.queue_id)) AS newest
)
SELECT consumer_group.name, consumer_group.paused, consumer_group.broadcast,
       ARRAY(SELECT name FROM {schema}.subscription JOIN {schema}.topic USING (topic_id)
             WHERE subscription.group_id = consumer_group.group_id ORDER BY name) AS topics,
       (SELECT count(*) FROM {schema}.consumer
        WHERE consumer.group_id = consumer_group.group_id AND expires_at > clock_timestamp()) AS live_consumers,
       coalesce(sum(head - start_offset - moved) FILTER (WHERE NOT is_retry), 0)::bigint AS queued,
       coalesce(sum(handled), 0)::bigint AS handled, coalesce(sum(skipped), 0)::bigint AS skipped,
       coalesce(sum(filtered), 0)::bigint AS filtered,
       coalesce(sum(waiting) FILTER (WHERE NOT is_retry), 0)::bigint AS lag,
       coalesce(sum(scheduled + waiting) FILTER (WHERE is_retry), 0)::bigint AS retrying,
       (SELECT count(*) FROM {schema}.dead_letter
        WHERE dead_letter.group_id = consumer_group.group_id AND replayed_at IS NULL) AS dead,
       coalesce((SELECT sum(discarded) FROM {schema}.subscription
                 WHERE subscription.group_id = consumer_group.group_id), 0)::bigint AS discarded,
       coalesce(sum(expired + missed), 0)::bigint AS expired, coalesce(sum(missed), 0)::bigint AS missed,
       (SELECT coalesce(sum(recalled), 0)::bigint FROM {schema}.subscription
        WHERE subscription.group_id = consumer_group.group_id) AS recalled
FROM {schema}.consumer_group LEFT JOIN counted USING (group_id)
GROUP BY consumer_group.group_id ORDER BY consumer_group.name
""")
