-- Change 10: when an entry was queued; dead letters that were discarded; topics that were deleted.
-- Locks: consume_queue, topic, subscription, dead_letter

-- In two steps, so that entries from before this change keep null.
ALTER TABLE consume_queue ADD COLUMN queued_at timestamptz;
ALTER TABLE consume_queue ALTER COLUMN queued_at SET DEFAULT now();

ALTER TABLE dead_letter ADD COLUMN discarded_at timestamptz;
ALTER TABLE subscription ADD COLUMN discarded bigint NOT NULL DEFAULT 0;

ALTER TABLE topic ADD COLUMN deleted_at timestamptz;

COMMENT ON COLUMN queue.number IS
    'In a retry topic (retry_of): the id of the topic whose failed messages the queue carries; 0: of all topics';
