-- Change 10: when an entry was queued; dead letters that were discarded; topics that were deleted.

-- A message may be queued long after it was stored: decided late, delayed, held. Filled by the default, so by code of
-- the version before too; null for entries of before this change (docs/decisions/070).
ALTER TABLE consume_queue ADD COLUMN queued_at timestamptz;
ALTER TABLE consume_queue ALTER COLUMN queued_at SET DEFAULT now();

-- Set together with `replayed_at`, by which code and views of before know that a letter is settled.
ALTER TABLE dead_letter ADD COLUMN discarded_at timestamptz;
-- How many dead letters of the group on the topic were discarded: their rows go with their messages.
ALTER TABLE subscription ADD COLUMN discarded bigint NOT NULL DEFAULT 0;

-- A deleted topic takes no messages; retention removes those it has. The row stays: what was sent by processes that
-- did not know yet is not lost, and declaring the topic again takes it back (docs/decisions/072).
ALTER TABLE topic ADD COLUMN deleted_at timestamptz;

COMMENT ON COLUMN queue.number IS
    'In a retry topic (retry_of): the id of the topic whose failed messages the queue carries; 0: of all topics';
