-- Return the messages with these ids that are stored, with the decisions of their transactions. It runs with the rights
-- of its owner, and returns no content: a publisher that sends a message again may not read the log (docs/decisions/235).
CREATE OR REPLACE FUNCTION stored_messages(message_ids uuid[])
RETURNS TABLE (message_id uuid, log_id bigint, transaction_id uuid, half boolean, decision text)
LANGUAGE sql STABLE SECURITY DEFINER SET search_path FROM CURRENT AS $$
    SELECT log.message_id, log.log_id, log.transaction_id, log.half, op.decision::text
    FROM commit_log AS log LEFT JOIN op_log AS op USING (transaction_id)
    WHERE log.message_id = ANY (message_ids)
$$;
