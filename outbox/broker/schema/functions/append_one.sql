-- Store one message: as a half message, or together with the decision COMMIT; then also return which database of which
-- server this is. Without a `log_id` nothing was stored: the message id is stored already, or the operator has switched
-- transactional messages off. A process may remember a topic from before a restore that took it away, and then its id:
-- no queue would get the message, so it is refused.
--
-- A function, because connections of applications prepare nothing, and planning the statement takes longer than running
-- it. The session keeps the plans of a function. It runs with the rights of its owner, so that a publisher needs no
-- right on the tables (docs/decisions/235).
CREATE OR REPLACE FUNCTION append_one(
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
    transactional    boolean,
    half             boolean,
    immunity_seconds integer,
    ledger_id        uuid,
    OUT log_id       bigint,
    OUT started_at   numeric,
    OUT database     text
)
LANGUAGE plpgsql SECURITY DEFINER SET search_path FROM CURRENT AS $$
#variable_conflict use_variable
DECLARE
    here broker;
BEGIN
    IF (half OR producer_group <> '') AND NOT may_publish_for(producer_group) THEN
        RAISE EXCEPTION 'this role may not publish for producer group %', quote_literal(producer_group)
            USING ERRCODE = 'insufficient_privilege';
    END IF;
    SELECT broker.* INTO here FROM broker JOIN topic ON topic.topic_id = append_one.topic_id;
    IF NOT FOUND OR NOT born_at BETWEEN '0001-01-02 UTC' AND '9999-12-30 UTC'
       OR NOT deliver_at BETWEEN '0001-01-02 UTC' AND '9999-12-30 UTC'
       OR NOT delay_seconds BETWEEN 0 AND 2e11 OR shard < 0 OR length(key) > 255 OR length(tag) > 127
       OR length(content_type) > 255 OR content_type ~ '[[:cntrl:]]' OR jsonb_typeof(headers) <> 'object' THEN
        PERFORM refuse_undeliverable(message_id, topic_id, shard, key, tag, content_type, headers, born_at, deliver_at);
    END IF;
    IF NOT half THEN
        started_at := extract(epoch FROM pg_postmaster_start_time())::numeric;
        database := current_database();
    END IF;
    IF (transactional OR half IS NOT FALSE) AND here.reject_transactional THEN
        RETURN;
    END IF;
    INSERT INTO commit_log AS stored (born_at, deliver_at, transaction_id, message_id, topic_id, shard, half,
                                      immunity_seconds, ledger_id, producer_group, key, tag, content_type,
                                      headers, body)
    VALUES (born_at, coalesce(deliver_at, clock_timestamp() + make_interval(secs => delay_seconds)), message_id,
            message_id, topic_id, shard, half, immunity_seconds, ledger_id, producer_group, key, tag, content_type,
            headers, body)
    ON CONFLICT ON CONSTRAINT commit_log_message_id_key DO NOTHING
    RETURNING stored.log_id INTO log_id;
    IF log_id IS NOT NULL AND NOT half THEN
        INSERT INTO op_log (transaction_id, decision, decided_by, log_ids)
        VALUES (message_id, 'C', 'P', ARRAY[log_id]);
    END IF;
END $$;
