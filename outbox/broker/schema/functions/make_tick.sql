-- Make one tick: decided and due messages become entries of queues, and the tick records how far it has read.
-- outbox/broker/leading.py calls it in a REPEATABLE READ transaction, so that all statements see one
-- snapshot.
--
-- The parts for FIFO, delayed and held messages run only if there are any. With an `obstacle` nothing was done:
--   life        `own_life` is over, by a start, promotion or restore: data in the caller's memory may be lost
--   overtaken   another leader has ticked since `last_tick`
--   topics      other topics than `known_fifo` are FIFO now
--   order       there are FIFO messages: the caller first looks at them and names those that must wait
CREATE OR REPLACE FUNCTION make_tick(
    own_life        uuid,
    own_instance    uuid,
    last_tick       bigint,
    own_incarnation integer,
    -- The transactions that the last tick could not see: from `seen_xmax` on, and those of `seen_xip`.
    seen_xmax       xid8,
    seen_xip        xid8[],
    -- The same for the half messages of FIFO topics that the caller knows.
    half_xmax       xid8,
    half_xip        xid8[],
    known_fifo      integer[],
    -- The newest time of parking that the caller knows.
    known_parked    timestamptz,
    -- As far as the caller knows, no scheduled message is due before this time. Only dead rows are there, which vacuum
    -- cannot remove while a transaction is held open.
    due_from        timestamptz,
    -- Whether a FIFO message is open or held, as far as the caller knows.
    is_waiting      boolean,
    -- Whether the caller commits only after a look at the messages in `met`.
    is_asking       boolean,
    -- Whether the caller has looked at all FIFO messages in this transaction. Then `to_hold` has those that must wait,
    -- and `to_release` the held ones that need not wait any more.
    has_looked      boolean,
    to_hold         bigint[],
    to_release      bigint[],
    batch           bigint,
    -- Store the heads of all queues, so that earlier ticks can be removed.
    is_full_tick    boolean,
    OUT obstacle         text,
    OUT seen             text,
    -- The decisions that this tick could see; null without a tick, because there was no new work.
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
    -- The ids of the queues with new entries; '' if there are more than 50, null if there are none.
    OUT grown            text,
    -- Whether another consumer process lives than the caller's, which has to learn of the new entries.
    OUT is_heard         boolean,
    -- The FIFO messages decided here while any are open or held, as [log_id, topic_id, key], for a caller that is
    -- asking. It must not commit if one of them has to wait or other messages waited for it. Null for none.
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
    -- Messages by how they became ready for their first delivery: decided just now, or due or released after a wait.
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
    -- The marks show a restore under this connection; a restart of the server would have ended the connection.
    SELECT EXISTS (SELECT FROM life_sign JOIN life USING (life_id)
                   WHERE life_id = own_life AND life.mark = life.xmin AND life.mark = life_sign.xmin)
               AND (SELECT count(*) FROM life_sign) = 1,
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

    -- The new decisions: a few at once; if there are more, as many as the batch allows.
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
        cut := decisions_cut(seen_xmax, batch);
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

    -- Scheduled messages that are due.
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

    -- The entries: each queue from its head on, in the order of the log.
    IF decided <> '{}' OR waited <> '{}' OR retried <> '{}' THEN
        WITH placed AS MATERIALIZED (
            SELECT log.log_id, queue.queue_id, 0::smallint AS attempt
            FROM (SELECT unnest(decided) AS log_id, false AS has_waited
                  UNION ALL
                  SELECT unnest(waited), true) AS ready
            CROSS JOIN LATERAL (SELECT log_id, topic_id, coalesce(shard, log_id) AS shard, deliver_at
                                FROM commit_log WHERE commit_log.log_id = ready.log_id OFFSET 0) AS log
            JOIN topic USING (topic_id)
            JOIN queue ON queue.topic_id = topic.topic_id AND queue.layout = topic.layout
                      AND queue.number = abs(log.shard % topic.queue_count)::integer
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
        IF moved_queues <> '{}' THEN
            grown := CASE WHEN cardinality(moved_queues) <= 50 THEN array_to_string(moved_queues, ' ') ELSE '' END;
            -- A process that joins after this snapshot looks at its queues as soon as it gets them.
            is_heard := EXISTS (SELECT FROM consumer WHERE instance_id <> own_instance AND expires_at > now());
        END IF;
    END IF;
    -- The others are to be delivered later.
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
    -- A transaction that stores a retry commits a moment after it set the due time.
    nothing_due_before := nothing_due_before - interval '1 second';
    -- Before version 17, PostgreSQL cannot subtract infinite times. Only a program beside outbox stores such a time.
    next_due_seconds := extract(epoch FROM next_due) - extract(epoch FROM now());
    IF decision_count + due_count + released_count + held_count + closed_count > 0 THEN
        IF is_full_tick THEN
            SELECT coalesce(array_agg(queue_id), '{}'), coalesce(array_agg(head), '{}') INTO moved_queues, moved_heads
            FROM queue_head WHERE head > 0;
        END IF;
        -- A tick that a crash loses is made again. The commit waits for the disk if the tick's input could be lost by
        -- then: decisions that may be lost themselves, scheduled messages, which a recall would find again, or a
        -- standby that takes over.
        IF NOT is_relaxed AND due_count = 0 AND current_setting('synchronous_standby_names') = '' THEN
            PERFORM set_config('synchronous_commit', 'off', true);
        END IF;
        stored := here;
        IF cut < upto THEN
            -- As if all transactions from the cut on had not begun yet.
            stored := concat_ws(':', least(pg_snapshot_xmin(here), cut), cut,
                                (SELECT coalesce(string_agg(xip::text, ',' ORDER BY xip), '')
                                 FROM pg_snapshot_xip(here) AS xip WHERE xip < cut));
        END IF;
        INSERT INTO tick (tick_id, snapshot, incarnation, appended, queue_ids, heads, is_full)
        VALUES (last_tick + 1, stored::pg_snapshot, own_incarnation, appended_count, moved_queues, moved_heads, is_full_tick);
    END IF;
END $$;
