-- Store one half message, and return its position in the log; null if its id is stored already, or if the operator has
-- switched transactional messages off. It runs with the rights of its owner (docs/decisions/235).
CREATE OR REPLACE FUNCTION append_half(
    message_id       uuid,
    topic_id         integer,
    shard            integer,
    key              text,
    tag              text,
    content_type     text,
    body             bytea,
    headers          jsonb,
    born_at          timestamptz,
    deliver_at       timestamptz,
    delay_seconds    double precision,
    producer_group   text,
    immunity_seconds integer,
    ledger_id        uuid
) RETURNS bigint
LANGUAGE plpgsql SECURITY DEFINER SET search_path FROM CURRENT AS $$
#variable_conflict use_variable
DECLARE
    log_id bigint;
BEGIN
    IF NOT may_publish_for(producer_group) THEN
        RAISE EXCEPTION 'this role may not publish for producer group %', quote_literal(producer_group)
            USING ERRCODE = 'insufficient_privilege';
    END IF;
    -- As in append_one.
    PERFORM FROM topic WHERE topic.topic_id = append_half.topic_id;
    IF NOT FOUND OR NOT born_at BETWEEN '0001-01-02 UTC' AND '9999-12-30 UTC'
       OR NOT deliver_at BETWEEN '0001-01-02 UTC' AND '9999-12-30 UTC'
       OR NOT delay_seconds BETWEEN 0 AND 2e11 OR shard < 0 OR length(key) > 255 OR length(tag) > 127
       OR length(content_type) > 255 OR content_type ~ '[[:cntrl:]]' OR jsonb_typeof(headers) <> 'object' THEN
        PERFORM refuse_undeliverable(message_id, topic_id, shard, key, tag, content_type, headers, born_at, deliver_at);
    END IF;
    INSERT INTO commit_log AS stored (born_at, deliver_at, transaction_id, message_id, topic_id, shard, half,
                                      immunity_seconds, ledger_id, producer_group, key, tag, content_type,
                                      headers, body)
    SELECT born_at, coalesce(deliver_at, clock_timestamp() + make_interval(secs => delay_seconds)), message_id,
           message_id, topic_id, shard, true, immunity_seconds, ledger_id, producer_group, key, tag,
           content_type, headers, body
    FROM broker WHERE NOT reject_transactional
    ON CONFLICT ON CONSTRAINT commit_log_message_id_key DO NOTHING
    RETURNING stored.log_id INTO log_id;
    RETURN log_id;
END $$;
