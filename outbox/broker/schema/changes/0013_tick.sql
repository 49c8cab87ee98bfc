-- Change 13: a tick is a few small statements in one function.
-- Locks: topic

CREATE INDEX topic_fifo ON topic (topic_id) WHERE 'FIFO' = ANY (message_types);

CREATE VIEW queue_head AS
SELECT queue.queue_id, greatest(queue.floor, coalesce(last_entry.queue_offset + 1, 0)) AS head
FROM queue
LEFT JOIN LATERAL (
    SELECT entry.queue_offset FROM consume_queue entry
    WHERE entry.queue_id = queue.queue_id AND entry.queue_offset >= queue.floor
    ORDER BY entry.queue_offset DESC LIMIT 1
) AS last_entry ON true;
