-- Make undecided transactions (parked ones too) due for a check now, and return their number. `ids` are ids of
-- transactions; those of their further messages do not count. Before its immunity ends, the check of a transaction
-- writes no tombstone. It runs with the rights of its owner (docs/decisions/235).
CREATE OR REPLACE FUNCTION make_checks_due(ids uuid[], default_immunity_seconds integer) RETURNS integer
LANGUAGE plpgsql SECURITY DEFINER SET search_path FROM CURRENT AS $$
DECLARE
    hinted integer;
BEGIN
    -- Sorted, because inserts that may conflict must lock in one order.
    INSERT INTO pending_check AS pending (transaction_id, log_id, producer_group, stored_at, immune_until, due_at)
    SELECT transaction_id, log_id, coalesce(producer_group, ''), stored_at,
           stored_at + make_interval(secs => coalesce(immunity_seconds, default_immunity_seconds)), now()
    FROM commit_log AS half_row
    WHERE message_id = ANY (ids) AND message_id = transaction_id AND half
      AND NOT EXISTS (SELECT FROM op_log WHERE op_log.transaction_id = half_row.transaction_id)
    ORDER BY transaction_id
    ON CONFLICT (transaction_id) DO UPDATE SET due_at = least(pending.due_at, now());
    GET DIAGNOSTICS hinted = ROW_COUNT;
    RETURN hinted;
END $$;
