-- Publish a JSON message from SQL, for triggers and other languages, on the atomic path of the caller's transaction.
--
-- It runs with the rights of its owner and with this search_path, whatever the caller's is: a role that may execute it
-- needs no right on the tables, and cannot write what the checks refuse. No role may execute it without a GRANT:
--
--     GRANT USAGE ON SCHEMA outbox TO shop;
--     GRANT EXECUTE ON FUNCTION outbox.publish TO shop;
CREATE OR REPLACE FUNCTION publish(
    topic          text,
    body           jsonb,
    key            text        DEFAULT '',
    tag            text        DEFAULT '',
    headers        jsonb       DEFAULT '{}',
    deliver_at     timestamptz DEFAULT NULL,
    message_id     uuid        DEFAULT NULL,
    shard          integer     DEFAULT NULL,
    producer_group text        DEFAULT '',
    -- Wake the leader at once; otherwise it finds the message with its next tick.
    wake           boolean     DEFAULT false
) RETURNS uuid
LANGUAGE sql VOLATILE SECURITY DEFINER SET search_path FROM CURRENT AS $$
    SELECT publish_bytes(topic, convert_to(body::text, 'UTF8'), 'application/json', key, tag, headers, deliver_at,
                         message_id, shard, producer_group, wake)
$$;
