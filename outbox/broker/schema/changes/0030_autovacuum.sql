-- Change 30: autovacuum begins earlier on the large tables (docs/decisions/282).
--
-- By default, autovacuum waits until a fifth of a table is dead. With a hundred million messages a day and three days of
-- retention, that is 60 million dead rows, whose space is not used again before.
--
-- The statements stop neither readers nor writers. They wait for a vacuum that runs; a vacuum against the wraparound of
-- transaction ids may run for hours, so the change then fails and is tried again.

SET LOCAL lock_timeout = '10s';
ALTER TABLE commit_log SET (autovacuum_vacuum_scale_factor = 0.05);
ALTER TABLE op_log SET (autovacuum_vacuum_scale_factor = 0.05);
ALTER TABLE consume_queue SET (autovacuum_vacuum_scale_factor = 0.05);
