-- Change 14: what a producer does for one message is one call, whose plan its session keeps.
--
-- An application's connections prepare nothing, and planning the statement took longer than running it. Code calls the
-- function that it came with: a later change puts another one beside it. Names are looked up where these tables are,
-- whatever the session's search_path.

-- Store one message together with the decision COMMIT. No `log_id`: its id is stored already, or the operator has
-- switched transactional messages off. Also tells which database of which server this is.
CREATE FUNCTION append_one_v14(
    message_id     uuid,
    topic_id       integer,
    shard          integer,
    key            text,
    tag            text,
    content_type   text,
    body           bytea,
    headers        jsonb,
    born_at        timestamptz,
    deliver_at     timestamptz,
    delay_seconds  double precision,
    producer_group text,
    transactional  boolean,
    OUT log_id     bigint,
    OUT started_at numeric,
    OUT database   text
)
LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
#variable_conflict use_variable
DECLARE
    here broker;
BEGIN
    SELECT * INTO STRICT here FROM broker;
    started_at := extract(epoch FROM pg_postmaster_start_time())::numeric;
    database := current_database();
    IF transactional AND here.reject_transactional THEN
        RETURN;
    END IF;
    INSERT INTO commit_log AS stored (born_at, deliver_at, transaction_id, message_id, topic_id, shard, half,
                                      producer_group, key, tag, content_type, headers, body)
    VALUES (born_at, coalesce(deliver_at, clock_timestamp() + make_interval(secs => delay_seconds)), message_id,
            message_id, topic_id, shard, false, producer_group, key, tag, content_type, headers, body)
    ON CONFLICT ON CONSTRAINT commit_log_message_id_key DO NOTHING
    RETURNING stored.log_id INTO log_id;
    IF log_id IS NOT NULL THEN
        INSERT INTO op_log (transaction_id, incarnation, decision, decided_by, log_ids)
        VALUES (message_id, here.incarnation, 'C', 'P', ARRAY[log_id]);
    END IF;
END $$;

-- Record how a producer's local transaction ended, as its end message says: 'applied', 'repeated', 'contradicted' (the
-- other decision stood already, and stands) or 'refused' (no such half message, or another group's). The last two
-- leave an incident and a warning, because nobody waits for the answer.
CREATE FUNCTION end_one_v14(ended uuid, reported "char", reporter text) RETURNS text
LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
DECLARE
    half     record;
    standing "char";
    outcome  text := 'refused';
    problem  text;
BEGIN
    SELECT log.half, log.xid, log.transaction_id, log.producer_group INTO half FROM commit_log AS log
    WHERE log.message_id = ended;
    IF half.half AND half.transaction_id = ended AND half.producer_group IS NOT DISTINCT FROM reporter THEN
        -- The log ids are read here: what the caller remembers cannot add or omit a message.
        INSERT INTO op_log (transaction_id, incarnation, decision, decided_by, log_ids)
        VALUES (ended, (SELECT incarnation FROM broker), reported, 'P',
                ARRAY(SELECT log_id FROM commit_log AS rows
                      WHERE rows.half AND rows.xid = half.xid AND rows.transaction_id = ended ORDER BY log_id))
        ON CONFLICT (transaction_id) DO NOTHING;
        IF FOUND THEN
            RETURN 'applied';
        END IF;
        SELECT decision INTO standing FROM op_log WHERE transaction_id = ended;
        IF standing = reported THEN
            RETURN 'repeated';
        END IF;
        outcome := 'contradicted';
        problem := 'but the other decision stood already and still stands';
    ELSIF half.half THEN
        problem := format('refused: the half message belongs to group %L', coalesce(half.producer_group, ''));
    ELSE
        problem := 'refused: there is no such half message';
    END IF;
    problem := format('PRODUCER of group %L reported %s, %s', reporter,
                      CASE reported WHEN 'C' THEN 'COMMIT' ELSE 'ROLLBACK' END, problem);
    INSERT INTO incident (kind, subject, detail) VALUES (outcome, ended, problem);
    RAISE WARNING 'incident %: %: %', outcome, ended, problem;
    RETURN outcome;
END $$;
