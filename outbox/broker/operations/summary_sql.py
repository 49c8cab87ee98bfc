"""The statements of the summary. Each may read many rows: they run in the background, not for a reader."""

from __future__ import annotations

from typing import Final

from outbox.broker.database.statement import Statement

# Per group and topic (or the group's retry queue). Newest positions are read once from end to end: a look-up for each
# of the 32,000 pairs of 200 topics and 20 groups takes several times as long. Heads are looked up, one per queue.
# `oldest_at`: the time since which the first unfinished message could be consumed.
_GROUPS: Final = """
WITH newest AS MATERIALIZED (
    SELECT DISTINCT ON (group_id, queue_id) *
    FROM {schema}.consumer_offset
    ORDER BY group_id DESC, queue_id DESC, epoch DESC, ordinal DESC
), head AS MATERIALIZED (
    SELECT queue_id, queue.topic_id, queue.number,
           greatest(queue.floor, coalesce(
               (SELECT queue_offset + 1 FROM {schema}.consume_queue entry WHERE entry.queue_id = queue.queue_id
                ORDER BY queue_offset DESC LIMIT 1), 0)) AS head
    FROM {schema}.queue
), place AS (
    SELECT group_id, topic_id, mode, false AS is_retry FROM {schema}.subscription
    UNION ALL
    SELECT retry_of, topic_id, 'concurrent', true FROM {schema}.topic WHERE retry_of IS NOT NULL
), pair AS MATERIALIZED (
    SELECT place.group_id, place.topic_id, place.mode, place.is_retry, head.queue_id, head.head,
           coalesce(newest.next_offset, 0) AS next_offset, newest.start_offset, newest.moved, newest.handled,
           newest.filtered, newest.skipped, newest.sent_back, newest.dead, newest.expired, lease.stopped
    FROM place JOIN {schema}.consumer_group USING (group_id) JOIN head USING (topic_id)
    LEFT JOIN newest USING (group_id, queue_id)
    LEFT JOIN {schema}.queue_lease lease USING (group_id, queue_id)
    WHERE NOT broadcast
), waiting AS MATERIALIZED (
    SELECT pair.group_id, pair.queue_id,
           -- After a send-back it could be consumed again only later. If it fails in place, it waits since it was
           -- queued.
           greatest(log.stored_at, log.deliver_at, op.decided_at, CASE WHEN is_retry THEN failed.newest END)
               AS oldest_at,
           NOT is_retry AND mode <> 'concurrent' AND failed.newest IS NOT NULL AS blocked
    FROM pair
    CROSS JOIN LATERAL (SELECT log_id FROM {schema}.consume_queue entry
                        WHERE entry.queue_id = pair.queue_id AND queue_offset >= next_offset
                        ORDER BY queue_offset LIMIT 1) AS first
    -- OFFSET 0: one look-up by key each, regardless of the statistics of fast-growing tables.
    CROSS JOIN LATERAL (SELECT half, transaction_id, stored_at, deliver_at FROM {schema}.commit_log
                        WHERE log_id = first.log_id OFFSET 0) AS log
    LEFT JOIN LATERAL (SELECT decided_at FROM {schema}.op_log WHERE transaction_id = log.transaction_id OFFSET 0) AS op
      ON log.half
    LEFT JOIN LATERAL (SELECT max(failed_at) AS newest FROM {schema}.failure
                       WHERE failure.group_id = pair.group_id AND failure.log_id = first.log_id) AS failed
      ON mode <> 'concurrent' OR is_retry
    WHERE head > next_offset
)
SELECT consumer_group.name AS group, topic.name AS topic, pair.is_retry, consumer_group.paused,
       count(*) AS queues, sum(greatest(0, head - next_offset))::bigint AS lag,
       extract(epoch FROM min(oldest_at))::double precision AS oldest_at,
       sum(coalesce(head - start_offset - moved, head))::bigint AS queued,
       coalesce(sum(handled), 0)::bigint AS handled, coalesce(sum(filtered), 0)::bigint AS filtered,
       coalesce(sum(skipped), 0)::bigint AS skipped, coalesce(sum(sent_back), 0)::bigint AS sent_back,
       coalesce(sum(dead), 0)::bigint AS dead, coalesce(sum(expired), 0)::bigint AS expired,
       count(*) FILTER (WHERE blocked) AS blocked, count(stopped) AS stopped
FROM pair
JOIN {schema}.consumer_group USING (group_id)
JOIN {schema}.topic USING (topic_id)
LEFT JOIN waiting USING (group_id, queue_id)
GROUP BY consumer_group.group_id, topic.topic_id, pair.is_retry
ORDER BY consumer_group.name, pair.is_retry, topic.name
"""

# Per group the data with separate rows: unsettled dead letters, and retries that wait for their time.
_RESTS: Final = """
SELECT consumer_group.name AS group, consumer_group.paused, consumer_group.broadcast,
       coalesce(letters.dead, 0) AS dead, extract(epoch FROM letters.newest)::double precision AS newest_dead_at,
       coalesce(retries.waiting, 0) AS retrying
FROM {schema}.consumer_group
LEFT JOIN (SELECT group_id, count(*) AS dead, max(dead_at) AS newest FROM {schema}.dead_letter
           WHERE replayed_at IS NULL GROUP BY group_id) AS letters USING (group_id)
LEFT JOIN (SELECT retry_of AS group_id, count(*) AS waiting
           FROM {schema}.scheduled JOIN {schema}.queue USING (queue_id) JOIN {schema}.topic USING (topic_id)
           WHERE retry_of IS NOT NULL GROUP BY retry_of) AS retries USING (group_id)
ORDER BY consumer_group.name
"""

# Per producer group: undecided half transactions. `unanswered`: those whose check has been due for `late`.
_PRODUCERS: Final = """
SELECT producer_group AS group, count(*) FILTER (WHERE parked_at IS NULL) AS undecided,
       count(*) FILTER (WHERE parked_at IS NOT NULL) AS parked,
       extract(epoch FROM min(stored_at) FILTER (WHERE parked_at IS NULL))::double precision AS oldest_at,
       extract(epoch FROM min(due_at) FILTER (WHERE parked_at IS NULL))::double precision AS due_since,
       extract(epoch FROM min(stored_at) FILTER (WHERE parked_at IS NOT NULL))::double precision AS oldest_parked_at
FROM {schema}.pending_check pending
WHERE NOT EXISTS (SELECT FROM {schema}.op_log WHERE op_log.transaction_id = pending.transaction_id)
GROUP BY producer_group ORDER BY producer_group
"""

# Per topic; `behind_since`: the time at which the oldest message that every group has consumed passed its retention
# time.
_TOPICS: Final = """
WITH newest AS MATERIALIZED (
    SELECT DISTINCT ON (group_id, queue_id) group_id, queue_id, next_offset
    FROM {schema}.consumer_offset
    ORDER BY group_id DESC, queue_id DESC, epoch DESC, ordinal DESC
), reader AS (
    SELECT group_id, topic_id FROM {schema}.subscription JOIN {schema}.consumer_group USING (group_id)
    WHERE NOT broadcast
), consumed AS MATERIALIZED (
    SELECT queue_id, min(coalesce(newest.next_offset, 0)) AS position
    FROM reader JOIN {schema}.queue USING (topic_id) LEFT JOIN newest USING (group_id, queue_id) GROUP BY queue_id
), of_queue AS (
    SELECT queue.topic_id,
           greatest(queue.floor, coalesce(
               (SELECT queue_offset + 1 FROM {schema}.consume_queue entry WHERE entry.queue_id = queue.queue_id
                ORDER BY queue_offset DESC LIMIT 1), 0)) AS head,
           (SELECT log.stored_at
            FROM {schema}.consume_queue entry JOIN {schema}.commit_log log USING (log_id)
            WHERE entry.queue_id = queue.queue_id AND entry.queue_offset = queue.floor
              AND queue.floor < consumed.position) AS oldest_consumed
    FROM {schema}.queue LEFT JOIN consumed USING (queue_id)
), undecided AS (
    SELECT topic_id, count(*) FILTER (WHERE parked_at IS NULL) AS undecided, count(parked_at) AS parked
    FROM {schema}.pending_check pending JOIN {schema}.commit_log USING (log_id)
    WHERE NOT EXISTS (SELECT FROM {schema}.op_log WHERE op_log.transaction_id = pending.transaction_id)
    GROUP BY topic_id
)
SELECT topic.name AS topic, count(*) AS queues, sum(head)::bigint AS queued,
       coalesce(min(undecided.undecided), 0) AS undecided, coalesce(min(undecided.parked), 0) AS parked,
       (SELECT count(*) FROM {schema}.held WHERE held.topic_id = topic.topic_id) AS held,
       extract(epoch FROM min(oldest_consumed) + make_interval(secs => topic.retention_seconds))::double precision
           AS behind_since
FROM of_queue JOIN {schema}.topic USING (topic_id) LEFT JOIN undecided USING (topic_id)
WHERE topic.retry_of IS NULL
GROUP BY topic.topic_id ORDER BY topic.name
"""

# All of the above, the time, and the number of drawn log ids in one statement: separate ones would cost round trips
# every few seconds, even when nothing happens.
COUNT: Final = Statement(f"""
SELECT extract(epoch FROM clock_timestamp())::double precision,
       (SELECT CASE WHEN has_sequence_privilege(ids, 'SELECT, USAGE') THEN coalesce(pg_sequence_last_value(ids), 0) END
        FROM CAST(pg_get_serial_sequence('{{schema}}.commit_log', 'log_id') AS regclass) AS ids),
       (SELECT coalesce(jsonb_agg(to_jsonb(counted)), '[]') FROM ({_GROUPS}) AS counted),
       (SELECT coalesce(jsonb_agg(to_jsonb(counted)), '[]') FROM ({_RESTS}) AS counted),
       (SELECT coalesce(jsonb_agg(to_jsonb(counted)), '[]') FROM ({_PRODUCERS}) AS counted),
       (SELECT coalesce(jsonb_agg(to_jsonb(counted)), '[]') FROM ({_TOPICS}) AS counted)
""")

# The blocked queues by name: an ordered group's next message has failed.
BLOCKED: Final = Statement("""
SELECT consumer_group.name AS group, topic.name AS topic, queue.number AS queue, log.message_id::text AS message,
       log.key, failed.error, extract(epoch FROM failed.since)::double precision AS since
FROM {schema}.subscription JOIN {schema}.consumer_group USING (group_id)
JOIN {schema}.topic USING (topic_id) JOIN {schema}.queue USING (topic_id)
CROSS JOIN LATERAL (SELECT next_offset FROM {schema}.consumer_offset stored
                    WHERE stored.group_id = subscription.group_id AND stored.queue_id = queue.queue_id
                    ORDER BY epoch DESC, ordinal DESC LIMIT 1) AS newest
JOIN {schema}.consume_queue entry ON entry.queue_id = queue.queue_id AND entry.queue_offset = newest.next_offset
JOIN {schema}.commit_log log USING (log_id)
CROSS JOIN LATERAL (SELECT min(failed_at) AS since, (array_agg(error ORDER BY attempt DESC))[1] AS error
                    FROM {schema}.failure
                    WHERE failure.group_id = subscription.group_id AND failure.log_id = log.log_id) AS failed
WHERE mode <> 'concurrent' AND NOT broadcast AND failed.since IS NOT NULL
ORDER BY failed.since LIMIT %(limit)s
""")

# Enough summaries are kept for the rates of the last quarter of an hour.
STORE: Final = Statement("""
WITH trimmed AS (
    DELETE FROM {schema}.summary WHERE at < clock_timestamp() - interval '15 minutes'
      AND summary_id < (SELECT max(summary_id) FROM {schema}.summary)
)
INSERT INTO {schema}.summary (took_seconds, facts, totals)
VALUES (%(took)s, %(facts)s::text::jsonb, %(totals)s::text::jsonb)
""")

NEWEST: Final = Statement("""
SELECT extract(epoch FROM at)::double precision, took_seconds,
       extract(epoch FROM clock_timestamp())::double precision, facts
FROM {schema}.summary ORDER BY summary_id DESC LIMIT 1
""")

# The totals of the youngest summary of at least this age, and of the newest.
TOTALS: Final = Statement("""
(SELECT extract(epoch FROM at)::double precision, totals FROM {schema}.summary
 WHERE at <= clock_timestamp() - make_interval(secs => %(window)s) ORDER BY summary_id DESC LIMIT 1)
UNION ALL
(SELECT extract(epoch FROM at)::double precision, totals FROM {schema}.summary ORDER BY summary_id DESC LIMIT 1)
""")

HISTORY: Final = Statement("""
SELECT extract(epoch FROM at)::double precision, totals FROM {schema}.summary ORDER BY summary_id DESC LIMIT 200
""")
