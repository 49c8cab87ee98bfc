-- Change 13: a tick is a few small statements in one function.
--
-- Code calls the function that it came with: a later change puts another one beside it and leaves this one to the code
-- before. Plans are cached by the session that calls; the caller's transaction is REPEATABLE READ, so that all statements
-- see one snapshot. Names are looked up where these tables are, whatever the session's search_path.

-- All FIFO topics, which every tick asks for, without reading the others.
CREATE INDEX topic_fifo ON topic (topic_id) WHERE 'FIFO' = ANY (message_types);

-- The next offset of each queue: behind its last entry, or at its floor, which whoever removes entries raises with them.
CREATE VIEW queue_head AS
SELECT queue.queue_id, greatest(queue.floor, coalesce(last_entry.queue_offset + 1, 0)) AS head
FROM queue
LEFT JOIN LATERAL (
    SELECT entry.queue_offset FROM consume_queue entry
    -- From the floor on: what was removed below it may be there still, as dead rows.
    WHERE entry.queue_id = queue.queue_id AND entry.queue_offset >= queue.floor
    ORDER BY entry.queue_offset DESC LIMIT 1
) AS last_entry ON true;

-- The transaction id at which a long backlog of decisions is cut; the snapshot's end for a short one.
-- About `batch` messages are below it; the decisions of one transaction stay together. Bounded by the snapshot, because
-- rows of before a restore may carry ids of the future.
CREATE FUNCTION decisions_cut_v13(seen_xmax xid8, batch bigint) RETURNS xid8
LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
DECLARE
    upto    xid8 := pg_snapshot_xmax(pg_current_snapshot());
    cut     xid8;
    is_long boolean;
BEGIN
    SELECT count(*) > batch OR sum(cardinality(log_ids)) > batch INTO is_long
    FROM (SELECT log_ids FROM op_log WHERE xid >= seen_xmax AND xid < upto ORDER BY xid LIMIT batch + 1) AS unread;
    IF is_long THEN
        SELECT coalesce(
            min(xid) FILTER (WHERE earlier >= batch),
            CASE WHEN sum(decisions) > batch THEN
                (SELECT min(next.xid) FROM op_log next WHERE next.xid > max(per_xid.xid) AND next.xid < upto) END)
        INTO cut
        FROM (
            SELECT xid, count(*) AS decisions, sum(sum(messages)) OVER (ORDER BY xid) - sum(messages) AS earlier
            FROM (SELECT xid, cardinality(log_ids) AS messages FROM op_log
                  WHERE xid >= seen_xmax AND xid < upto ORDER BY xid LIMIT batch + 1) AS unread
            GROUP BY xid
        ) AS per_xid;
    END IF;
    RETURN coalesce(cut, upto);
END $$;

-- One tick: what was decided or is due becomes entries of queues, and how far was read is written down with them.
--
-- The parts for FIFO, delayed and held messages are entered only when there are any. With an `obstacle` nothing was done:
--   overtaken   another leader has ticked since `last_tick`
--   topics      other topics than `known_fifo` are FIFO now
--   order       there are FIFO messages of which the caller has to say what must wait: it looks at them first
CREATE FUNCTION tick_v13(
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
    -- Whether a FIFO message is open or held, by what the caller knows.
    is_waiting      boolean,
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
    OUT next_due_seconds double precision
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
BEGIN
    seen := here;
    appended_count := 0;
    held_count := 0;
    released_count := 0;
    scheduled_count := 0;
    due_count := 0;
    SELECT (SELECT max(tick_id) FROM tick),
           ARRAY(SELECT topic_id FROM topic WHERE 'FIFO' = ANY (message_types) ORDER BY topic_id),
           EXISTS (SELECT FROM queue WHERE closing),
           EXISTS (SELECT FROM scheduled WHERE due_at <= now()),
           (SELECT min(due_at) FROM scheduled WHERE due_at > now())
    INTO newest_tick, fifo, is_closing, is_due, next_due;
    IF newest_tick <> last_tick THEN
        obstacle := 'overtaken';
        RETURN;
    END IF;
    IF fifo <> known_fifo THEN
        obstacle := 'topics';
        RETURN;
    END IF;

    -- The new decisions.
    cut := decisions_cut_v13(seen_xmax, batch);
    SELECT count(*) FILTER (WHERE number = 1 OR number IS NULL),
           coalesce(array_agg(log_id) FILTER (WHERE decision = 'C'), '{}'),
           coalesce(array_agg(log_id) FILTER (WHERE decision = 'R'), '{}')
    INTO decision_count, decided, rolled_back
    FROM (SELECT decision, log_ids FROM op_log WHERE xid >= seen_xmax AND xid < cut
          UNION ALL
          SELECT decision, log_ids FROM op_log WHERE xid = ANY (seen_xip)) AS fresh
    LEFT JOIN LATERAL unnest(log_ids) WITH ORDINALITY AS one (log_id, number) ON true;

    IF fifo <> '{}' AND NOT has_looked THEN
        IF EXISTS (SELECT FROM commit_log
                   WHERE half AND xid >= half_xmax AND xid < upto AND deliver_at IS NULL AND topic_id = ANY (fifo))
        OR EXISTS (SELECT FROM commit_log
                   WHERE half AND xid = ANY (half_xip) AND deliver_at IS NULL AND topic_id = ANY (fifo))
        OR ((is_waiting OR cut < upto)
            AND EXISTS (SELECT FROM unnest(decided || rolled_back) AS one (log_id)
                        CROSS JOIN LATERAL (SELECT topic_id FROM commit_log WHERE commit_log.log_id = one.log_id
                                            OFFSET 0) AS log
                        WHERE topic_id = ANY (fifo)))
        OR (is_waiting AND is_due
            AND EXISTS (SELECT FROM (SELECT log_id, queue_id FROM scheduled WHERE due_at <= now()
                                     ORDER BY due_at, schedule_id LIMIT batch) AS due
                        CROSS JOIN LATERAL (SELECT topic_id FROM commit_log WHERE commit_log.log_id = due.log_id
                                            OFFSET 0) AS log
                        WHERE queue_id IS NULL AND topic_id = ANY (fifo)))
        OR (is_waiting
            AND (SELECT max(parked_at) FROM pending_check WHERE parked_at IS NOT NULL) IS DISTINCT FROM known_parked)
        THEN
            obstacle := 'order';
            RETURN;
        END IF;
    END IF;

    -- What has waited.
    IF is_due THEN
        WITH due AS (
            DELETE FROM scheduled
            WHERE schedule_id = ANY (ARRAY(SELECT schedule_id FROM scheduled WHERE due_at <= now()
                                           ORDER BY due_at, schedule_id LIMIT batch))
            RETURNING log_id, queue_id, attempt
        )
        SELECT count(*),
               coalesce(array_agg(log_id) FILTER (WHERE queue_id IS NULL), '{}'),
               coalesce(array_agg(log_id) FILTER (WHERE queue_id IS NOT NULL), '{}'),
               array_agg(queue_id) FILTER (WHERE queue_id IS NOT NULL),
               array_agg(attempt) FILTER (WHERE queue_id IS NOT NULL)
        INTO due_count, waited, retried, retry_queues, attempts
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
        next_due := (SELECT min(due_at) FROM scheduled WHERE due_at > now());
    END IF;
    IF is_closing THEN
        UPDATE queue SET closing = false, closed_at = head
        FROM queue_head WHERE queue.closing AND queue_head.queue_id = queue.queue_id;
        GET DIAGNOSTICS closed_count = ROW_COUNT;
    END IF;

    more := cut < upto OR due_count = batch;
    next_due_seconds := extract(epoch FROM next_due - now());
    IF decision_count + due_count + released_count + held_count + closed_count > 0 THEN
        IF is_full_tick THEN
            SELECT coalesce(array_agg(queue_id), '{}'), coalesce(array_agg(head), '{}') INTO moved_queues, moved_heads
            FROM queue_head WHERE head > 0;
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
