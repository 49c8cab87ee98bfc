-- Change 13: a tick is a few small statements in one function.
--
-- Code calls the function that it came with: a later change puts another one beside it and leaves this one to the code
-- before. Plans are cached by the session that calls; the caller's transaction is REPEATABLE READ, so that all statements
-- see one snapshot. Names are looked up where these tables are, whatever the session's search_path.

-- All FIFO topics, which every tick asks for, without reading the others.
CREATE INDEX topic_fifo ON topic (topic_id) WHERE 'FIFO' = ANY (message_types);

-- The next offset of each queue: behind its last entry, or at its floor, which whoever removes entries raises with them.
CREATE VIEW queue_head AS
SELECT queue.queue_id, greatest(queue.floor, coalesce(last_entry.queue_offset + 1, 0)) AS head
FROM queue
LEFT JOIN LATERAL (
    SELECT entry.queue_offset FROM consume_queue entry
    -- From the floor on: what was removed below it may be there still, as dead rows.
    WHERE entry.queue_id = queue.queue_id AND entry.queue_offset >= queue.floor
    ORDER BY entry.queue_offset DESC LIMIT 1
) AS last_entry ON true;

-- The transaction id at which a long backlog of decisions is cut; the snapshot's end for a short one.
-- About `batch` messages are below it; the decisions of one transaction stay together. Bounded by the snapshot, because
-- rows of before a restore may carry ids of the future.
CREATE FUNCTION decisions_cut_v13(seen_xmax xid8, batch bigint) RETURNS xid8
LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
DECLARE
    upto    xid8 := pg_snapshot_xmax(pg_current_snapshot());
    cut     xid8;
    is_long boolean;
BEGIN
    SELECT count(*) > batch OR sum(cardinality(log_ids)) > batch INTO is_long
    FROM (SELECT log_ids FROM op_log WHERE xid >= seen_xmax AND xid < upto ORDER BY xid LIMIT batch + 1) AS unread;
    IF is_long THEN
        SELECT coalesce(
            min(xid) FILTER (WHERE earlier >= batch),
            CASE WHEN sum(decisions) > batch THEN
                (SELECT min(next.xid) FROM op_log next WHERE next.xid > max(per_xid.xid) AND next.xid < upto) END)
        INTO cut
        FROM (
            SELECT xid, count(*) AS decisions, sum(sum(messages)) OVER (ORDER BY xid) - sum(messages) AS earlier
            FROM (SELECT xid, cardinality(log_ids) AS messages FROM op_log
                  WHERE xid >= seen_xmax AND xid < upto ORDER BY xid LIMIT batch + 1) AS unread
            GROUP BY xid
        ) AS per_xid;
    END IF;
    RETURN coalesce(cut, upto);
END $$;
