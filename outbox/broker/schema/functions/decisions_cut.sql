-- Return the transaction id up to which to read decisions: inside a long backlog, else the snapshot's end.
--
-- About `batch` messages are below it; the decisions of one transaction stay together. The snapshot bounds the query,
-- because rows from before a restore may carry higher ids than the present ones.
CREATE OR REPLACE FUNCTION decisions_cut(seen_xmax xid8, batch bigint) RETURNS xid8
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
