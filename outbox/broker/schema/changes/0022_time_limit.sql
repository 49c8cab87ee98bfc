-- Change 22: messages with a time limit (docs/decisions/207).
-- Locks: subscription
--
-- A database that unreleased code installed may have these already.

CREATE TABLE IF NOT EXISTS timed_out (
    group_id     integer     NOT NULL,
    log_id       bigint      NOT NULL,
    queue_id     integer     NOT NULL,
    queue_offset bigint      NOT NULL,
    timed_out_at timestamptz NOT NULL DEFAULT clock_timestamp()
);
CREATE INDEX IF NOT EXISTS timed_out_message ON timed_out (log_id);
ALTER TABLE subscription ADD COLUMN IF NOT EXISTS timed_out bigint NOT NULL DEFAULT 0;

CREATE OR REPLACE VIEW timed_out_v1 AS
SELECT g.name AS consumer_group, o.log_id, l.message_id, t.name AS topic, l.key, l.tag, l.stored_at,
       max(o.timed_out_at) AS timed_out_at
FROM timed_out o
JOIN consumer_group g USING (group_id)
JOIN commit_log l USING (log_id)
JOIN topic t USING (topic_id)
GROUP BY g.group_id, o.log_id, l.log_id, t.topic_id;
