-- Change 15: what a crash of the server takes, nobody goes on from; so a tick need not wait for the disk.
--
-- A tick that a crash takes is made again, maybe with other messages at the same offsets. Whoever remembers offsets
-- (consumers, the sequencer) outlives the server, so each life of the server gets a number of its own, and what was
-- remembered in an earlier one is forgotten (docs/decisions/145).

-- The lives of the server: each begins with the first connection of the broker after a start, crash, promotion or
-- restore.
CREATE TABLE life (
    life_id   uuid        PRIMARY KEY,
    ordinal   bigint      GENERATED ALWAYS AS IDENTITY UNIQUE,
    began_at  timestamptz NOT NULL DEFAULT clock_timestamp(),
    server    text        NOT NULL,
    -- The next offsets of all queues that had any, before the first tick of this life.
    queue_ids integer[]   NOT NULL,
    heads     bigint[]    NOT NULL
);

-- The life that lasts. Unlogged: empty after every crash recovery, promotion and restore of a backup, also where the
-- postmaster survives because a backend alone was killed, of which pg_postmaster_start_time() says nothing.
CREATE UNLOGGED TABLE life_sign (
    life_id uuid NOT NULL,
    server  text NOT NULL
);

-- Which start of which server this is.
CREATE FUNCTION this_server_v15() RETURNS text
LANGUAGE sql STABLE AS $$
    SELECT concat_ws(' ', system_identifier, substr(pg_walfile_name(pg_current_wal_insert_lsn()), 1, 8),
                     extract(epoch FROM pg_postmaster_start_time()))
    FROM pg_control_system()
$$;

-- Begin a life unless one lasts; the life that lasts then. Not inside a transaction with an older snapshot.
CREATE FUNCTION begin_life_v15() RETURNS uuid
LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
DECLARE
    lasting uuid;
BEGIN
    -- In this order, as whoever resets offsets: who has begun to store positions or failures under a lease of before
    -- ends first, and who comes later finds its lease gone.
    LOCK TABLE life, queue_lease, consumer_offset, finished_ahead IN SHARE ROW EXCLUSIVE MODE;
    SELECT life_sign.life_id INTO lasting FROM life_sign JOIN life USING (life_id)
    WHERE life_sign.server = this_server_v15();
    IF FOUND THEN
        RETURN lasting;
    END IF;
    lasting := gen_random_uuid();
    PERFORM set_config('synchronous_commit', 'on', true);
    INSERT INTO life (life_id, server, queue_ids, heads)
    SELECT lasting, this_server_v15(), coalesce(array_agg(queue_id), '{}'), coalesce(array_agg(head), '{}')
    FROM queue_head WHERE head > 0;
    -- Their owners keep them until their ends, as those of the dead do: handlers of before may still be running.
    UPDATE queue_lease SET epoch = epoch + 1;
    -- What was stored from memory of before. `moved` keeps the counters conserved.
    INSERT INTO consumer_offset (group_id, queue_id, epoch, ordinal, next_offset, start_offset, handled, filtered, skipped,
                                 sent_back, dead, expired, moved)
    SELECT group_id, queue_id, queue_lease.epoch, 0, head, least(start_offset, head), handled, filtered, skipped,
           sent_back, dead, expired,
           head - least(start_offset, head) - (next_offset - start_offset - moved)
    FROM queue_lease JOIN queue_head USING (queue_id)
    CROSS JOIN LATERAL (
        SELECT * FROM consumer_offset stored
        WHERE stored.group_id = queue_lease.group_id AND stored.queue_id = queue_lease.queue_id
        ORDER BY stored.epoch DESC, stored.ordinal DESC LIMIT 1
    ) AS newest (next_offset, former_epoch, former_ordinal, handled, filtered, skipped, sent_back, dead, expired,
                 start_offset, moved, former_group, former_queue, stored_at)
    WHERE next_offset > head;
    DELETE FROM finished_ahead USING queue_head
    WHERE queue_head.queue_id = finished_ahead.queue_id AND queue_offset >= head;
    DELETE FROM life WHERE began_at < now() - interval '30 days' AND life_id <> lasting;
    DELETE FROM life_sign;
    INSERT INTO life_sign (life_id, server) VALUES (lasting, this_server_v15());
    RETURN lasting;
END $$;

-- How a decision was committed by who made it: below 'on', a crash may take it although it could be seen. A tick that
-- reads such a one waits for the disk, which takes both there.
ALTER TABLE op_log ADD COLUMN relaxed boolean;
ALTER TABLE op_log ALTER COLUMN relaxed SET DEFAULT current_setting('synchronous_commit') NOT IN ('on', 'remote_apply');

-- Record how a producer's local transaction ended, as its end message says: 'applied', 'repeated', 'contradicted' (the
-- other decision stood already, and stands) or 'refused' (no such half message, or another group's). The last two
-- leave an incident and a warning, because nobody waits for the answer. An end that a crash takes is asked for again: it
-- does not wait for the disk where a ledger will give the same answer.
CREATE FUNCTION end_one_v15(ended uuid, reported "char", reporter text) RETURNS text
LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
DECLARE
    half     record;
    standing "char";
    outcome  text := 'refused';
    problem  text;
BEGIN
    SELECT log.half, log.xid, log.transaction_id, log.producer_group, log.ledger_id INTO half FROM commit_log AS log
    WHERE log.message_id = ended;
    IF half.half AND half.transaction_id = ended AND half.producer_group IS NOT DISTINCT FROM reporter THEN
        -- The log ids are read here: what the caller remembers cannot add or omit a message.
        INSERT INTO op_log (transaction_id, incarnation, decision, decided_by, relaxed, log_ids)
        VALUES (ended, (SELECT incarnation FROM broker), reported, 'P',
                half.ledger_id IS NULL AND current_setting('synchronous_commit') NOT IN ('on', 'remote_apply'),
                ARRAY(SELECT log_id FROM commit_log AS rows
                      WHERE rows.half AND rows.xid = half.xid AND rows.transaction_id = ended ORDER BY log_id))
        ON CONFLICT (transaction_id) DO NOTHING;
        IF FOUND THEN
            IF half.ledger_id IS NOT NULL THEN
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

-- One tick: what was decided or is due becomes entries of queues, and how far was read is written down with them.
--
-- The parts for FIFO, delayed and held messages are entered only when there are any. With an `obstacle` nothing was done:
--   life        the server has started or was promoted since `own_life` began: what the caller remembers may be lost
--   overtaken   another leader has ticked since `last_tick`
--   topics      other topics than `known_fifo` are FIFO now
--   order       there are FIFO messages of which the caller has to say what must wait: it looks at them first
CREATE FUNCTION tick_v15(
    own_life        uuid,
    last_tick       bigint,
    own_incarnation integer,
    -- What the last tick could not see: the transactions from `seen_xmax` on, and those of `seen_xip`.
    seen_xmax       xid8,
    seen_xip        xid8[],
    -- The same for the half messages of FIFO topics that the caller knows.
    half_xmax       xid8,
    half_xip        xid8[],
    known_fifo      integer[],
    -- The newest time of parking that the caller has heard of.
    known_parked    timestamptz,
    -- Nothing scheduled is due before this, as far as the caller knows: there are only dead rows, which nobody can remove
    -- while some transaction is held open.
    due_from        timestamptz,
    -- Whether a FIFO message is open or held, by what the caller knows.
    is_waiting      boolean,
    -- Whether the caller commits only after it has looked at what was `met`.
    is_asking       boolean,
    -- Whether the caller has looked at all FIFO messages in this transaction; then `to_hold` has those that must wait,
    -- and `to_release` the held ones that need not any more.
    has_looked      boolean,
    to_hold         bigint[],
    to_release      bigint[],
    batch           bigint,
    -- Write down the heads of all queues, so that the ticks before can go.
    is_full_tick    boolean,
    OUT obstacle         text,
    OUT seen             text,
    -- What this tick could see of the decisions; null without a tick, because nothing was new.
    OUT stored           text,
    OUT more             boolean,
    OUT decision_count   bigint,
    OUT appended_count   bigint,
    OUT held_count       bigint,
    OUT released_count   bigint,
    OUT scheduled_count  bigint,
    OUT due_count        bigint,
    OUT next_due_seconds double precision,
    OUT nothing_due_before timestamptz,
    -- The FIFO messages decided here while any are open or held, as [log_id, topic_id, key], for a caller that is asking:
    -- it must not commit if one of them has to wait or was waited for. Null for none.
    OUT met              json
)
LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
DECLARE
    here         pg_snapshot := pg_current_snapshot();
    upto         xid8 := pg_snapshot_xmax(here);
    cut          xid8;
    newest_tick  bigint;
    fifo         integer[];
    is_due       boolean;
    is_closing   boolean;
    closed_count bigint := 0;
    next_due     timestamptz;
    -- Messages by how they came to be ready for their first delivery: decided just now, or due or released after a wait.
    decided      bigint[];
    rolled_back  bigint[];
    waited       bigint[] := '{}';
    released     bigint[];
    -- Retries that are due: message, retry queue, attempt.
    retried      bigint[] := '{}';
    retry_queues integer[];
    attempts     smallint[];
    moved_queues integer[] := '{}';
    moved_heads  bigint[] := '{}';
    is_alive     boolean;
    is_relaxed   boolean;
    few          bigint := least(batch, 10) + 1;
BEGIN
    seen := here;
    appended_count := 0;
    held_count := 0;
    released_count := 0;
    scheduled_count := 0;
    due_count := 0;
    SELECT EXISTS (SELECT FROM life_sign WHERE life_id = own_life),
           (SELECT max(tick_id) FROM tick),
           ARRAY(SELECT topic_id FROM topic WHERE 'FIFO' = ANY (message_types) ORDER BY topic_id),
           EXISTS (SELECT FROM queue WHERE closing),
           (SELECT min(due_at) FROM scheduled WHERE due_at >= due_from)
    INTO is_alive, newest_tick, fifo, is_closing, next_due;
    is_due := coalesce(next_due <= now(), false);
    IF NOT is_alive THEN
        obstacle := 'life';
        RETURN;
    END IF;
    IF newest_tick <> last_tick THEN
        obstacle := 'overtaken';
        RETURN;
    END IF;
    IF fifo <> known_fifo THEN
        obstacle := 'topics';
        RETURN;
    END IF;

    -- The new decisions: a few at once; of more, as many as the batch allows.
    cut := upto;
    LOOP
        SELECT count(*) FILTER (WHERE number = 1 OR number IS NULL),
               coalesce(array_agg(log_id) FILTER (WHERE decision = 'C'), '{}'),
               coalesce(array_agg(log_id) FILTER (WHERE decision = 'R'), '{}'),
               coalesce(bool_or(relaxed IS NOT FALSE), false)
        INTO decision_count, decided, rolled_back, is_relaxed
        FROM ((SELECT decision, log_ids, relaxed FROM op_log WHERE xid >= seen_xmax AND xid < cut ORDER BY xid LIMIT few)
              UNION ALL
              SELECT decision, log_ids, relaxed FROM op_log WHERE xid = ANY (seen_xip)) AS fresh
        LEFT JOIN LATERAL unnest(log_ids) WITH ORDINALITY AS one (log_id, number) ON true;
        EXIT WHEN few IS NULL OR (decision_count < few AND cardinality(decided) + cardinality(rolled_back) <= batch);
        cut := decisions_cut_v13(seen_xmax, batch);
        few := NULL;
    END LOOP;

    IF fifo <> '{}' AND NOT has_looked THEN
        IF EXISTS (SELECT FROM commit_log
                   WHERE half AND xid >= half_xmax AND xid < upto AND deliver_at IS NULL AND topic_id = ANY (fifo))
        OR EXISTS (SELECT FROM commit_log
                   WHERE half AND xid = ANY (half_xip) AND deliver_at IS NULL AND topic_id = ANY (fifo))
        THEN
            obstacle := 'order';
            RETURN;
        END IF;
        IF (is_waiting OR cut < upto) AND decision_count > 0 THEN
            SELECT json_agg(json_build_array(log_id, topic_id, key)) INTO met
            FROM unnest(decided || rolled_back) AS one (log_id)
            CROSS JOIN LATERAL (SELECT topic_id, key FROM commit_log WHERE commit_log.log_id = one.log_id OFFSET 0) AS log
            WHERE topic_id = ANY (fifo);
        END IF;
        IF met IS NOT NULL AND (cut < upto OR NOT is_asking)
        OR is_waiting
           AND (SELECT max(parked_at) FROM pending_check WHERE parked_at IS NOT NULL) IS DISTINCT FROM known_parked
        THEN
            obstacle := 'order';
            RETURN;
        END IF;
        IF is_waiting AND is_due THEN
            IF EXISTS (SELECT FROM (SELECT log_id, queue_id FROM scheduled WHERE due_at >= due_from AND due_at <= now()
                                    ORDER BY due_at, schedule_id LIMIT batch) AS due
                       CROSS JOIN LATERAL (SELECT topic_id FROM commit_log WHERE commit_log.log_id = due.log_id
                                           OFFSET 0) AS log
                       WHERE queue_id IS NULL AND topic_id = ANY (fifo))
            THEN
                obstacle := 'order';
                RETURN;
            END IF;
        END IF;
    END IF;

    -- What has waited.
    IF is_due THEN
        WITH due AS (
            DELETE FROM scheduled
            WHERE schedule_id = ANY (ARRAY(SELECT schedule_id FROM scheduled WHERE due_at >= due_from AND due_at <= now()
                                           ORDER BY due_at, schedule_id LIMIT batch))
            RETURNING log_id, queue_id, attempt, due_at
        )
        SELECT count(*),
               coalesce(array_agg(log_id) FILTER (WHERE queue_id IS NULL), '{}'),
               coalesce(array_agg(log_id) FILTER (WHERE queue_id IS NOT NULL), '{}'),
               array_agg(queue_id) FILTER (WHERE queue_id IS NOT NULL),
               array_agg(attempt) FILTER (WHERE queue_id IS NOT NULL),
               max(due_at)
        INTO due_count, waited, retried, retry_queues, attempts, nothing_due_before
        FROM due;
    END IF;
    IF to_release <> '{}' THEN
        WITH gone AS (DELETE FROM held WHERE log_id = ANY (to_release) RETURNING log_id)
        SELECT count(*), coalesce(array_agg(log_id), '{}') INTO released_count, released FROM gone;
        waited := waited || released;
    END IF;
    IF to_hold <> '{}' THEN
        INSERT INTO held (log_id, topic_id, key)
        SELECT log_id, topic_id, key FROM unnest(to_hold) AS one (log_id) JOIN commit_log USING (log_id);
        GET DIAGNOSTICS held_count = ROW_COUNT;
        decided := ARRAY(SELECT unnest(decided) EXCEPT SELECT unnest(to_hold));
        waited := ARRAY(SELECT unnest(waited) EXCEPT SELECT unnest(to_hold));
    END IF;

    -- The entries: in each queue from its head on, in the order of the log.
    IF decided <> '{}' OR waited <> '{}' OR retried <> '{}' THEN
        WITH placed AS MATERIALIZED (
            SELECT log.log_id, queue.queue_id, 0::smallint AS attempt
            FROM (SELECT unnest(decided) AS log_id, false AS has_waited
                  UNION ALL
                  SELECT unnest(waited), true) AS ready
            CROSS JOIN LATERAL (SELECT log_id, topic_id, coalesce(shard, log_id) AS shard, deliver_at
                                FROM commit_log WHERE commit_log.log_id = ready.log_id OFFSET 0) AS log
            JOIN topic USING (topic_id)
            JOIN queue ON queue.topic_id = topic.topic_id AND queue.generation = topic.generation
                      AND queue.number = (log.shard % topic.queue_count)::integer
            WHERE has_waited OR deliver_at IS NULL OR deliver_at <= now()
            UNION ALL
            SELECT * FROM unnest(retried, retry_queues, attempts)
        ), head AS MATERIALIZED (
            SELECT queue_id, coalesce(head, 0) AS head, entries
            FROM (SELECT queue_id, count(*) AS entries FROM placed GROUP BY queue_id) AS touched
            LEFT JOIN queue_head USING (queue_id)
        ), entry AS (
            INSERT INTO consume_queue (queue_offset, log_id, queue_id, attempt)
            SELECT head + row_number() OVER (PARTITION BY queue_id ORDER BY log_id, attempt) - 1, log_id, queue_id, attempt
            FROM placed JOIN head USING (queue_id)
        )
        SELECT coalesce(sum(entries), 0), coalesce(array_agg(queue_id), '{}'), coalesce(array_agg(head + entries), '{}')
        INTO appended_count, moved_queues, moved_heads
        FROM head;
    END IF;
    -- Not all of them: the others are to be delivered later.
    IF appended_count < cardinality(decided) + cardinality(waited) + cardinality(retried) THEN
        INSERT INTO scheduled (log_id, due_at)
        SELECT log_id, deliver_at FROM unnest(decided) AS one (log_id) JOIN commit_log USING (log_id)
        WHERE deliver_at > now()
        ON CONFLICT DO NOTHING;
        GET DIAGNOSTICS scheduled_count = ROW_COUNT;
    END IF;
    IF is_due OR scheduled_count > 0 THEN
        next_due := (SELECT min(due_at) FROM scheduled WHERE due_at > now());
    END IF;
    IF is_closing THEN
        UPDATE queue SET closing = false, closed_at = head
        FROM queue_head WHERE queue.closing AND queue_head.queue_id = queue.queue_id;
        GET DIAGNOSTICS closed_count = ROW_COUNT;
    END IF;

    more := cut < upto OR due_count = batch;
    IF due_count < batch THEN
        nothing_due_before := now();
    END IF;
    -- Who stores a retry commits a moment after its due time was set.
    nothing_due_before := nothing_due_before - interval '1 second';
    next_due_seconds := extract(epoch FROM next_due - now());
    IF decision_count + due_count + released_count + held_count + closed_count > 0 THEN
        IF is_full_tick THEN
            SELECT coalesce(array_agg(queue_id), '{}'), coalesce(array_agg(head), '{}') INTO moved_queues, moved_heads
            FROM queue_head WHERE head > 0;
        END IF;
        -- A tick that a crash takes is made again. Not so where what it acts on could be gone or taken back by then: decisions
        -- that may be lost themselves, scheduled messages, which a recall finds again; a standby that takes over.
        IF NOT is_relaxed AND due_count = 0 AND current_setting('synchronous_standby_names') = '' THEN
            PERFORM set_config('synchronous_commit', 'off', true);
        END IF;
        stored := here;
        IF cut < upto THEN
            -- As if everything from the cut on were to begin yet.
            stored := concat_ws(':', least(pg_snapshot_xmin(here), cut), cut,
                                (SELECT coalesce(string_agg(xip::text, ',' ORDER BY xip), '')
                                 FROM pg_snapshot_xip(here) AS xip WHERE xip < cut));
        END IF;
        INSERT INTO tick (tick_id, snapshot, incarnation, appended, queue_ids, heads, is_full)
        VALUES (last_tick + 1, stored::pg_snapshot, own_incarnation, appended_count, moved_queues, moved_heads, is_full_tick);
    END IF;
END $$;
