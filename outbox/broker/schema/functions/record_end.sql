-- Record how a producer's local transaction ended, as its end message says: 'applied', 'repeated', 'contradicted' (the
-- other decision stood already, and stands) or 'refused' (no such half message, or another group's). The last two
-- leave an incident and a warning, because the producer does not wait for the answer. If `relaxes` and there is a
-- ledger, the commit does not wait for the WAL flush: after a crash check-back asks the ledger, which gives the same
-- answer. `decider`: the value of op_log.decided_by.
--
-- It runs with the rights of its owner, and refuses an end message of a role that may not decide for the group
-- (docs/decisions/235).
CREATE OR REPLACE FUNCTION record_end(
    ended    uuid,
    reported "char",
    reporter text,
    decider  "char"  DEFAULT 'P',
    relaxes  boolean DEFAULT true
) RETURNS text
LANGUAGE plpgsql SECURITY DEFINER SET search_path FROM CURRENT AS $$
DECLARE
    half     record;
    standing "char";
    outcome  text := 'refused';
    problem  text;
    -- For no group: only a role that may write decisions itself is entitled to be another decider.
    entitled boolean := may_publish_for(CASE decider WHEN 'P' THEN reporter END);
BEGIN
    -- op_log has no CHECK, and no reader would find a message with another decision.
    IF reported NOT IN ('C', 'R') THEN
        RAISE EXCEPTION 'the decision "%" of transaction % is neither C nor R', reported, ended
            USING ERRCODE = 'check_violation';
    END IF;
    SELECT log.half, log.xid, log.transaction_id, log.producer_group, log.ledger_id INTO half FROM commit_log AS log
    WHERE log.message_id = ended;
    IF entitled AND half.half AND half.transaction_id = ended
       AND half.producer_group IS NOT DISTINCT FROM reporter THEN
        -- The log ids are read here: what the caller remembers cannot add or omit a message.
        INSERT INTO op_log (transaction_id, decision, decided_by, relaxed, log_ids)
        VALUES (ended, reported, decider,
                (decider <> 'P' OR half.ledger_id IS NULL)
                    AND current_setting('synchronous_commit') NOT IN ('on', 'remote_apply'),
                ARRAY(SELECT log_id FROM commit_log AS rows
                      WHERE rows.half AND rows.xid = half.xid AND rows.transaction_id = ended ORDER BY log_id))
        ON CONFLICT (transaction_id) DO NOTHING;
        IF FOUND THEN
            IF relaxes AND half.ledger_id IS NOT NULL THEN
                PERFORM set_config('synchronous_commit', 'off', true);
            END IF;
            RETURN 'applied';
        END IF;
        SELECT decision INTO standing FROM op_log WHERE transaction_id = ended;
        IF standing = reported THEN
            RETURN 'repeated';
        END IF;
        outcome := 'contradicted';
        problem := 'but the other decision stood already and still stands';
    ELSIF NOT entitled THEN
        problem := format('refused: role %I may not decide for this group',
                          coalesce(nullif(current_setting('role'), 'none'), session_user));
    ELSIF half.half THEN
        problem := format('refused: the half message belongs to group %L', coalesce(half.producer_group, ''));
    ELSE
        problem := 'refused: there is no such half message';
    END IF;
    problem := format('%s of group %L reported %s, %s',
                      CASE decider WHEN 'P' THEN 'PRODUCER' WHEN 'K' THEN 'CHECK' ELSE 'OPERATOR' END, reporter,
                      CASE reported WHEN 'C' THEN 'COMMIT' ELSE 'ROLLBACK' END, problem);
    INSERT INTO incident (kind, subject, detail) VALUES (outcome, ended, problem);
    RAISE WARNING 'incident %: %: %', outcome, ended, problem;
    RETURN outcome;
END $$;
