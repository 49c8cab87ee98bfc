-- Change 9: views of checks and failures for readers outside.

CREATE VIEW check_v1 AS
SELECT transaction_id, checked_at, answer, detail FROM check_history;

CREATE VIEW failure_v1 AS
SELECT g.name AS consumer_group, f.log_id, f.attempt, f.failed_at, f.error
FROM failure f
JOIN consumer_group g USING (group_id);
