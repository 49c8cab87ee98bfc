"""The statements of retention. Each is bounded, and deletes behind the readers only."""

from __future__ import annotations

from typing import Final

from outbox.broker.database.statement import Statement

QUEUES: Final = Statement("""
SELECT queue_id FROM {schema}.queue ORDER BY queue_id
""")

# How far a queue may be cleared: past the retention time, and consumed by every group or past the hard cap.
# The cap counts from when a message could first be consumed: it may have been delayed or undecided for longer, and a
# retry or a replayed dead letter is as old as its last failure or its replay.
# `consumed` is the least position of the groups that read the queue; without a group nothing is consumed yet.
# Broadcast groups store no positions and hold nothing back.
LIMIT: Final = Statement("""
WITH place AS (
    SELECT queue.queue_id, queue.floor, topic.topic_id, topic.retry_of, topic.retention_seconds
    FROM {schema}.queue JOIN {schema}.topic USING (topic_id) WHERE queue_id = %(queue_id)s
), reader AS (
    SELECT group_id FROM {schema}.subscription JOIN place USING (topic_id)
    JOIN {schema}.consumer_group USING (group_id) WHERE NOT broadcast
    UNION SELECT retry_of FROM place WHERE retry_of IS NOT NULL
), consumed AS (
    SELECT min(coalesce(newest.next_offset, 0)) AS position
    FROM reader LEFT JOIN LATERAL (
        SELECT next_offset FROM {schema}.consumer_offset
        WHERE group_id = reader.group_id AND queue_id = %(queue_id)s
        ORDER BY epoch DESC, ordinal DESC LIMIT 1) newest ON true
), entry AS (
    SELECT entry.queue_offset, entry.log_id, log.transaction_id, log.stored_at, log.deliver_at,
           place.retention_seconds, coalesce(consumed.position, 0) AS consumed
    FROM place CROSS JOIN consumed
    CROSS JOIN LATERAL (SELECT queue_offset, log_id FROM {schema}.consume_queue
                        WHERE queue_id = place.queue_id AND queue_offset >= place.floor
                        ORDER BY queue_offset LIMIT %(batch)s) AS entry
    LEFT JOIN {schema}.commit_log log USING (log_id)
), judged AS (
    SELECT queue_offset, consumed,
           (stored_at IS NULL AND queue_offset < consumed)
           OR (stored_at < now() - make_interval(secs => retention_seconds)
               AND (queue_offset < consumed
                    OR CASE WHEN stored_at < now() - make_interval(secs => greatest(retention_seconds, %(cap)s))
                       THEN greatest(
                           deliver_at,
                           (SELECT decided_at FROM {schema}.op_log op WHERE op.transaction_id = entry.transaction_id),
                           (SELECT max(failed_at) FROM {schema}.failure JOIN place ON place.retry_of = failure.group_id
                            WHERE failure.log_id = entry.log_id),
                           (SELECT max(replayed_at) FROM {schema}.dead_letter dead
                            JOIN place ON place.retry_of = dead.group_id WHERE dead.log_id = entry.log_id)
                           ) < now() - make_interval(secs => greatest(retention_seconds, %(cap)s)) END)) AS old
    FROM entry
)
SELECT place.floor,
       coalesce((SELECT min(queue_offset) FROM judged WHERE old IS NOT TRUE),
                (SELECT max(queue_offset) + 1 FROM judged), place.floor) AS limit,
       (SELECT position FROM consumed) AS consumed, (SELECT count(*) FROM judged) AS looked_at,
       place.retry_of IS NOT NULL AS is_retry
FROM place
""")

# Kept although cleared: messages that are dead, to be retried, or waiting in a retry queue. Their entries stay below
# the floor as proof that they were queued, and go with them later.
CLEAR: Final = Statement("""
WITH candidate AS (
    SELECT entry.queue_offset, entry.log_id, log.topic_id, log.transaction_id
    FROM {schema}.consume_queue entry JOIN {schema}.commit_log log USING (log_id)
    WHERE queue_id = %(queue_id)s AND queue_offset >= %(first)s AND queue_offset < %(limit)s
    ORDER BY queue_offset LIMIT %(batch)s
), free AS MATERIALIZED (
    SELECT * FROM candidate
    WHERE NOT EXISTS (SELECT FROM {schema}.scheduled WHERE scheduled.log_id = candidate.log_id)
      AND NOT EXISTS (SELECT FROM {schema}.held WHERE held.log_id = candidate.log_id)
      AND NOT EXISTS (SELECT FROM {schema}.dead_letter dead WHERE dead.log_id = candidate.log_id
                         AND dead.replayed_at IS NULL)
      AND NOT EXISTS (
          SELECT FROM {schema}.failure
          JOIN {schema}.topic retry ON retry.retry_of = failure.group_id
          JOIN {schema}.queue ON queue.topic_id = retry.topic_id
          JOIN {schema}.consume_queue again ON again.queue_id = queue.queue_id AND again.log_id = failure.log_id
               AND again.queue_offset >= coalesce(
                   (SELECT next_offset FROM {schema}.consumer_offset newest
                    WHERE newest.group_id = failure.group_id AND newest.queue_id = queue.queue_id
                    ORDER BY epoch DESC, ordinal DESC LIMIT 1), 0)
          WHERE failure.log_id = candidate.log_id)
), entries AS (
    DELETE FROM {schema}.consume_queue USING free
    WHERE consume_queue.queue_id = %(queue_id)s AND consume_queue.queue_offset = free.queue_offset
), messages AS (
    DELETE FROM {schema}.commit_log USING free WHERE commit_log.log_id = free.log_id
), errors AS (
    DELETE FROM {schema}.failure USING free WHERE failure.log_id = free.log_id
), letters AS (
    DELETE FROM {schema}.dead_letter USING free WHERE dead_letter.log_id = free.log_id
), recalled AS (
    DELETE FROM {schema}.recalled_retry USING free WHERE recalled_retry.log_id = free.log_id
), checks AS (
    DELETE FROM {schema}.check_history USING free WHERE check_history.transaction_id = free.transaction_id
), pending AS (
    DELETE FROM {schema}.pending_check USING free WHERE pending_check.transaction_id = free.transaction_id
), decisions AS (
    DELETE FROM {schema}.op_log op
    WHERE op.transaction_id IN (SELECT transaction_id FROM free)
      AND NOT EXISTS (SELECT FROM unnest(op.log_ids) AS one (log_id) JOIN {schema}.commit_log log USING (log_id)
                      WHERE one.log_id NOT IN (SELECT log_id FROM free))
), floor AS (
    UPDATE {schema}.queue SET floor = %(limit)s WHERE queue_id = %(queue_id)s AND floor < %(limit)s
), totals AS (
    INSERT INTO {schema}.pruned (topic_id, sent, committed, queued)
    SELECT topic_id, count(*), count(*), count(*) FROM free GROUP BY topic_id
)
SELECT count(*) FROM free
""")

CLEAR_RETRY: Final = Statement("""
WITH entries AS (
    DELETE FROM {schema}.consume_queue
    WHERE queue_id = %(queue_id)s AND queue_offset >= %(first)s AND queue_offset < %(limit)s
    RETURNING 1
), floor AS (
    UPDATE {schema}.queue SET floor = %(limit)s WHERE queue_id = %(queue_id)s AND floor < %(limit)s
)
SELECT count(*) FROM entries
""")

# Messages that never were queued: rolled back, or recalled before they were due. A rollback stays until the sequencer
# has read it, which lets the key of an old message go on.
CLEAR_UNQUEUED: Final = Statement("""
WITH ended AS (
    (SELECT transaction_id, log_ids, 'R' AS what FROM {schema}.op_log
     WHERE decision = 'R' AND decided_at < now()
       AND pg_visible_in_snapshot(xid, (SELECT snapshot FROM {schema}.tick ORDER BY tick_id DESC LIMIT 1))
     ORDER BY decided_at LIMIT %(batch)s)
    UNION ALL
    (SELECT log.transaction_id, ARRAY[log_id], 'T' FROM {schema}.recalled JOIN {schema}.commit_log log USING (log_id)
     WHERE recalled_at < now() LIMIT %(batch)s)
), free AS MATERIALIZED (
    SELECT log.log_id, log.topic_id, log.transaction_id, ended.what
    FROM ended CROSS JOIN LATERAL unnest(log_ids) AS one (log_id) JOIN {schema}.commit_log log USING (log_id)
    JOIN {schema}.topic USING (topic_id)
    WHERE log.stored_at < now() - make_interval(secs => topic.retention_seconds)
), messages AS (
    DELETE FROM {schema}.commit_log USING free WHERE commit_log.log_id = free.log_id
), recalls AS (
    DELETE FROM {schema}.recalled USING free WHERE recalled.log_id = free.log_id
), checks AS (
    DELETE FROM {schema}.check_history USING free WHERE check_history.transaction_id = free.transaction_id
), pending AS (
    DELETE FROM {schema}.pending_check USING free WHERE pending_check.transaction_id = free.transaction_id
), decisions AS (
    DELETE FROM {schema}.op_log op
    WHERE op.transaction_id IN (SELECT transaction_id FROM free)
      AND NOT EXISTS (SELECT FROM unnest(op.log_ids) AS one (log_id) JOIN {schema}.commit_log log USING (log_id)
                      WHERE one.log_id NOT IN (SELECT log_id FROM free))
), totals AS (
    INSERT INTO {schema}.pruned (topic_id, sent, committed, rolled_back, recalled)
    SELECT topic_id, count(*), count(*) FILTER (WHERE what = 'T'), count(*) FILTER (WHERE what = 'R'),
           count(*) FILTER (WHERE what = 'T')
    FROM free GROUP BY topic_id
)
SELECT count(*) FROM free
""")

MERGE_TOTALS: Final = Statement("""
WITH parts AS (
    DELETE FROM {schema}.pruned RETURNING *
)
INSERT INTO {schema}.pruned (topic_id, sent, committed, rolled_back, recalled, queued)
SELECT topic_id, sum(sent), sum(committed), sum(rolled_back), sum(recalled), sum(queued) FROM parts GROUP BY topic_id
""")

TRIM_OFFSETS: Final = Statement("""
DELETE FROM {schema}.consumer_offset WHERE ctid = ANY (ARRAY(
    SELECT older.ctid FROM {schema}.consumer_offset older
    WHERE EXISTS (SELECT FROM {schema}.consumer_offset newer
                  WHERE newer.group_id = older.group_id AND newer.queue_id = older.queue_id
                    AND (newer.epoch, newer.ordinal) > (older.epoch, older.ordinal))
    LIMIT %(batch)s))
""")

TRIM_TICKS: Final = Statement("""
DELETE FROM {schema}.tick WHERE tick_id = ANY (ARRAY(
    SELECT tick_id FROM {schema}.tick WHERE tick_id < (SELECT max(tick_id) FROM {schema}.tick WHERE is_full)
    ORDER BY tick_id LIMIT %(batch)s))
""")

TRIM_SCANS: Final = Statement("""
DELETE FROM {schema}.half_scan WHERE scan_id < (SELECT max(scan_id) FROM {schema}.half_scan)
""")

TRIM_INCIDENTS: Final = Statement("""
DELETE FROM {schema}.incident WHERE at < now() - make_interval(secs => %(keep)s)
""")
