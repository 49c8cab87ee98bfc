-- Change 27: autovacuum begins earlier on the large tables (docs/decisions/282).
-- Locks: commit_log, op_log, consume_queue
--
-- By default, autovacuum waits until a fifth of a table is dead. With a hundred million messages a day and three days of
-- retention, that is 60 million dead rows, whose space is not used again before.

ALTER TABLE commit_log SET (autovacuum_vacuum_scale_factor = 0.05);
ALTER TABLE op_log SET (autovacuum_vacuum_scale_factor = 0.05);
ALTER TABLE consume_queue SET (autovacuum_vacuum_scale_factor = 0.05);
