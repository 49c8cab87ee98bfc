-- Store the messages of one call: as half messages, or with the decision COMMIT. Return their positions in the log, and
-- which database of which server this is. `log_ids` is null if no message was stored: all ids are stored already, or the
-- operator has switched transactional messages off. It runs with the rights of its owner (docs/decisions/235).
--
-- The first message names the transaction. If it is stored already and another message of the call is new, the call fails:
-- otherwise a publisher could add messages to the transaction of another group, or decide it.
--
-- If all messages have the same topic, tag or content type, the array is empty and the value is in one_topic, one_tag or
-- one_type. With `all_new`, an id that is stored already is an error: ON CONFLICT takes a quarter more CPU.
CREATE OR REPLACE FUNCTION append_batch(
    transaction_id   uuid,
    message_ids      uuid[],
    born             timestamptz[],
    deliver          timestamptz[],
    topics           integer[],
    shards           integer[],
    keys             text[],
    tags             text[],
    types            text[],
    header_maps      jsonb[],
    bodies           bytea[],
    delays           double precision[],
    one_topic        integer,
    one_tag          text,
    one_type         text,
    producer_group   text,
    transactional    boolean,
    half             boolean,
    immunity_seconds integer,
    ledger_id        uuid,
    all_new          boolean,
    OUT log_ids      bigint[],
    OUT started_at   numeric,
    OUT database     text
)
LANGUAGE plpgsql SECURITY DEFINER SET search_path FROM CURRENT AS $$
#variable_conflict use_variable
DECLARE
    here   broker;
    is_own boolean;
    -- Other topics are refused, as in append_one.
    known  CONSTANT integer[] := ARRAY(SELECT topic.topic_id FROM topic);
BEGIN
    IF (half OR producer_group <> '') AND NOT may_publish_for(producer_group) THEN
        RAISE EXCEPTION 'this role may not publish for producer group %', quote_literal(producer_group)
            USING ERRCODE = 'insufficient_privilege';
    END IF;
    SELECT * INTO STRICT here FROM broker;
    started_at := extract(epoch FROM pg_postmaster_start_time())::numeric;
    database := current_database();
    IF transactional AND here.reject_transactional THEN
        RETURN;
    END IF;
    IF all_new THEN
        WITH stored AS (
            INSERT INTO commit_log AS log (born_at, deliver_at, transaction_id, message_id, topic_id, shard, half,
                                           immunity_seconds, ledger_id, producer_group, key, tag, content_type,
                                           headers, body)
            SELECT given.born_at, coalesce(given.deliver_at, clock_timestamp() + make_interval(secs => given.delay)),
                   transaction_id, given.message_id, coalesce(given.topic_id, one_topic), given.shard, half,
                   immunity_seconds, ledger_id, producer_group,
                   CASE WHEN given.born_at BETWEEN '0001-01-02 UTC' AND '9999-12-30 UTC'
                             AND (given.deliver_at BETWEEN '0001-01-02 UTC' AND '9999-12-30 UTC') IS NOT FALSE
                             AND (given.delay BETWEEN 0 AND 2e11) IS NOT FALSE
                             AND coalesce(given.topic_id, one_topic) = ANY (known) AND (given.shard >= 0) IS NOT FALSE
                             AND length(given.key) <= 255 AND length(coalesce(given.tag, one_tag)) <= 127
                             AND length(coalesce(given.content_type, one_type)) <= 255
                             AND coalesce(given.content_type, one_type) !~ '[[:cntrl:]]'
                             AND (jsonb_typeof(given.headers) = 'object') IS NOT FALSE
                        THEN given.key
                        ELSE refuse_undeliverable(given.message_id, coalesce(given.topic_id, one_topic), given.shard,
                                                  given.key, coalesce(given.tag, one_tag),
                                                  coalesce(given.content_type, one_type), given.headers, given.born_at,
                                                  given.deliver_at)
                   END, coalesce(given.tag, one_tag),
                   coalesce(given.content_type, one_type), given.headers, given.body
            FROM unnest(message_ids, born, deliver, topics, shards, keys, tags, types, header_maps, bodies, delays)
                AS given (message_id, born_at, deliver_at, topic_id, shard, key, tag, content_type, headers, body, delay)
            RETURNING log.log_id, log.message_id
        )
        SELECT array_agg(stored.log_id ORDER BY stored.log_id), bool_or(stored.message_id = transaction_id)
        INTO log_ids, is_own FROM stored;
    ELSE
        WITH stored AS (
            INSERT INTO commit_log AS log (born_at, deliver_at, transaction_id, message_id, topic_id, shard, half,
                                           immunity_seconds, ledger_id, producer_group, key, tag, content_type,
                                           headers, body)
            SELECT given.born_at, coalesce(given.deliver_at, clock_timestamp() + make_interval(secs => given.delay)),
                   transaction_id, given.message_id, coalesce(given.topic_id, one_topic), given.shard, half,
                   immunity_seconds, ledger_id, producer_group,
                   CASE WHEN given.born_at BETWEEN '0001-01-02 UTC' AND '9999-12-30 UTC'
                             AND (given.deliver_at BETWEEN '0001-01-02 UTC' AND '9999-12-30 UTC') IS NOT FALSE
                             AND (given.delay BETWEEN 0 AND 2e11) IS NOT FALSE
                             AND coalesce(given.topic_id, one_topic) = ANY (known) AND (given.shard >= 0) IS NOT FALSE
                             AND length(given.key) <= 255 AND length(coalesce(given.tag, one_tag)) <= 127
                             AND length(coalesce(given.content_type, one_type)) <= 255
                             AND coalesce(given.content_type, one_type) !~ '[[:cntrl:]]'
                             AND (jsonb_typeof(given.headers) = 'object') IS NOT FALSE
                        THEN given.key
                        ELSE refuse_undeliverable(given.message_id, coalesce(given.topic_id, one_topic), given.shard,
                                                  given.key, coalesce(given.tag, one_tag),
                                                  coalesce(given.content_type, one_type), given.headers, given.born_at,
                                                  given.deliver_at)
                   END, coalesce(given.tag, one_tag),
                   coalesce(given.content_type, one_type), given.headers, given.body
            FROM unnest(message_ids, born, deliver, topics, shards, keys, tags, types, header_maps, bodies, delays)
                AS given (message_id, born_at, deliver_at, topic_id, shard, key, tag, content_type, headers, body, delay)
            ON CONFLICT ON CONSTRAINT commit_log_message_id_key DO NOTHING
            RETURNING log.log_id, log.message_id
        )
        SELECT array_agg(stored.log_id ORDER BY stored.log_id), bool_or(stored.message_id = transaction_id)
        INTO log_ids, is_own FROM stored;
    END IF;
    IF NOT is_own THEN
        RAISE EXCEPTION 'transaction % has not the first message of this call, or that message was sent before',
            transaction_id USING ERRCODE = 'unique_violation';
    END IF;
    IF log_ids IS NOT NULL AND NOT half THEN
        INSERT INTO op_log (transaction_id, decision, decided_by, log_ids)
        VALUES (transaction_id, 'C', 'P', log_ids);
    END IF;
END $$;
