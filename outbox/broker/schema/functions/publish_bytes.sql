-- Publish a message with any content type from SQL; otherwise as publish().
--
-- It has an INSERT of its own: calling append_one() would take 8 to 13 % more CPU (docs/decisions/196).
CREATE OR REPLACE FUNCTION publish_bytes(
    topic          text,
    body           bytea,
    content_type   text,
    key            text        DEFAULT '',
    tag            text        DEFAULT '',
    headers        jsonb       DEFAULT '{}',
    deliver_at     timestamptz DEFAULT NULL,
    message_id     uuid        DEFAULT NULL,
    shard          integer     DEFAULT NULL,
    producer_group text        DEFAULT '',
    wake           boolean     DEFAULT false
) RETURNS uuid
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path FROM CURRENT AS $$
#variable_conflict use_variable
DECLARE
    target    topic;
    complaint text;
    rejects   boolean;
    id        uuid := message_id;
    log_id    bigint;
BEGIN
    SELECT one.* INTO target FROM topic AS one
    WHERE one.name = topic AND one.retry_of IS NULL AND one.deleted_at IS NULL;
    IF target.topic_id IS NULL THEN
        RAISE EXCEPTION 'topic % is not declared', quote_nullable(topic)
            USING ERRCODE = 'undefined_object', HINT = 'Declare it in OUTBOX[''TOPICS''], and run migrate.';
    END IF;
    IF num_nulls(body, content_type, key, tag, headers, producer_group) > 0 THEN
        RAISE EXCEPTION 'topic %: body, content_type, key, tag, headers and producer_group cannot be null', topic
            USING ERRCODE = 'null_value_not_allowed';
    END IF;
    IF length(content_type) NOT BETWEEN 1 AND 255 OR content_type ~ '[[:cntrl:]]' THEN
        RAISE EXCEPTION 'topic % takes content types of 1 to 255 characters, without control characters', topic
            USING ERRCODE = 'invalid_parameter_value';
    END IF;
    complaint := publish_complaint(target, octet_length(body), key, tag, headers, deliver_at);
    IF complaint IS NOT NULL THEN
        RAISE EXCEPTION 'topic % %', topic, complaint USING ERRCODE = 'invalid_parameter_value';
    END IF;
    IF target.on_limit = 'refuse' AND (target.over_limit IS NOT NULL OR target.backlog_limit IS NOT NULL) THEN
        -- While no process leads, no process marks a topic.
        SELECT coalesce(target.over_limit ->> 'reason',
                        format('no process leads, and %s messages were stored since the backlog was last counted '
                               '(the limit is %s). Start a worker', uncounted, target.backlog_limit))
        INTO complaint FROM uncounted_messages() AS uncounted
        WHERE target.over_limit IS NOT NULL OR uncounted > target.backlog_limit;
        IF complaint IS NOT NULL THEN
            RAISE EXCEPTION 'topic % takes no messages now: %', topic, complaint
                USING ERRCODE = 'configuration_limit_exceeded', HINT = 'See docs/operations/sizing.md.';
        END IF;
    END IF;
    IF producer_group <> '' AND NOT may_publish_for(producer_group) THEN
        RAISE EXCEPTION 'this role may not publish for producer group %', quote_literal(producer_group)
            USING ERRCODE = 'insufficient_privilege';
    END IF;
    SELECT reject_transactional INTO rejects FROM broker;
    IF rejects THEN
        RAISE EXCEPTION 'the broker refuses transactional messages (its operator switched them off)'
            USING ERRCODE = 'object_not_in_prerequisite_state', HINT = '"outbox_transaction accept" switches them on.';
    END IF;
    IF 'FIFO' = ANY(target.message_types) AND target.key_lock THEN
        -- Before the position in the log is drawn, and held to the end of the transaction.
        PERFORM pg_advisory_xact_lock(key_lock_number(topic, key));
    END IF;
    IF id IS NULL THEN
        -- Version 7: 48 bits of milliseconds, so that the unique index stays append-only.
        id := encode(set_bit(set_bit(overlay(uuid_send(gen_random_uuid()) PLACING
            substring(int8send(floor(extract(epoch FROM clock_timestamp()) * 1000)::bigint) FROM 3) FROM 1 FOR 6),
            52, 1), 53, 1), 'hex')::uuid;
    END IF;
    INSERT INTO commit_log AS stored (born_at, deliver_at, transaction_id, message_id, topic_id, shard, half,
                                      producer_group, key, tag, content_type, headers, body)
    VALUES (clock_timestamp(), deliver_at, id, id, target.topic_id,
            coalesce(shard & 2147483647, CASE WHEN key <> '' THEN key_shard(key) END), false,
            producer_group, key, tag, content_type, nullif(headers, '{}'), body)
    ON CONFLICT ON CONSTRAINT commit_log_message_id_key DO NOTHING
    RETURNING stored.log_id INTO log_id;
    IF log_id IS NOT NULL THEN
        INSERT INTO op_log (transaction_id, decision, decided_by, log_ids)
        VALUES (id, 'C', 'P', ARRAY[log_id]);
        IF wake THEN
            PERFORM pg_notify(current_schema() || '_decided', '');
        END IF;
    END IF;
    RETURN id;
END $$;
