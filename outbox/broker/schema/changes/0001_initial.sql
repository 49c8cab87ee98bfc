-- Version 1 of the broker's tables. Run with search_path set to the broker's schema alone.
--
-- The hot path (commit_log, op_log, consume_queue, tick, consumer_offset) is append-only: no row that a
-- message passes through is updated, and readers only scan forward.

-- ---------------------------------------------------------------------------------------------------
-- The broker itself
-- ---------------------------------------------------------------------------------------------------

CREATE TABLE broker (
    singleton            boolean     PRIMARY KEY DEFAULT true CHECK (singleton),
    broker_id            uuid        NOT NULL DEFAULT gen_random_uuid(),
    -- Raised when transaction ids may have started over (restore, upgrade, failover).
    incarnation          integer     NOT NULL DEFAULT 1,
    system_identifier    text        NOT NULL,
    timeline             integer     NOT NULL,
    reject_transactional boolean     NOT NULL DEFAULT false,
    created_at           timestamptz NOT NULL DEFAULT now()
);

CREATE TABLE schema_version (
    version    integer     PRIMARY KEY,
    applied_at timestamptz NOT NULL DEFAULT now()
);

-- Whatever somebody should look at: contradicting or refused ends, wrong ledgers, parked transactions.
CREATE TABLE incident (
    incident_id bigint      GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    kind        text        NOT NULL,
    subject     text        NOT NULL,
    detail      text        NOT NULL,
    at          timestamptz NOT NULL DEFAULT now()
);
CREATE INDEX incident_at ON incident (at);

-- ---------------------------------------------------------------------------------------------------
-- Topics and queues
-- ---------------------------------------------------------------------------------------------------

CREATE TABLE topic (
    topic_id          integer     GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    name              text        NOT NULL UNIQUE,
    -- Any of NORMAL, FIFO, DELAY, TRANSACTION.
    message_types     text[]      NOT NULL,
    queue_count       integer     NOT NULL CHECK (queue_count BETWEEN 1 AND 1024),
    -- The generation of queues that new messages go to; changing the queue count starts another.
    generation        integer     NOT NULL DEFAULT 1,
    -- FIFO only: publish takes a lock per key, so that log order is the order of local commits.
    key_lock          boolean     NOT NULL DEFAULT true,
    -- FIFO only: whether a parked transaction keeps its key held ('hold') or lets it go on ('release').
    on_park           text        NOT NULL DEFAULT 'hold' CHECK (on_park IN ('hold', 'release')),
    retention_seconds bigint      NOT NULL DEFAULT 259200,
    -- The retry queue of this consumer group, if the topic is one ('%RETRY%group').
    retry_of          integer,
    created_at        timestamptz NOT NULL DEFAULT now()
);

CREATE TABLE queue (
    queue_id   integer GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    topic_id   integer NOT NULL REFERENCES topic,
    generation integer NOT NULL DEFAULT 1,
    number     integer NOT NULL,
    -- Set by the sequencer once an older generation gets no more messages: its final head.
    closed_at  bigint,
    -- Set with a change of the queue count, until the sequencer has written closed_at.
    closing    boolean NOT NULL DEFAULT false,
    -- Offsets below were removed by retention.
    floor      bigint  NOT NULL DEFAULT 0,
    UNIQUE (topic_id, generation, number)
);
CREATE INDEX queue_closing ON queue (queue_id) WHERE closing;

-- ---------------------------------------------------------------------------------------------------
-- The log
-- ---------------------------------------------------------------------------------------------------

-- All messages. Every body is stored once; rows with `half` are the half topic.
CREATE TABLE commit_log (
    log_id           bigint      GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    xid              xid8        NOT NULL DEFAULT pg_current_xact_id(),
    born_at          timestamptz NOT NULL,
    stored_at        timestamptz NOT NULL DEFAULT now(),
    deliver_at       timestamptz,
    transaction_id   uuid        NOT NULL,
    message_id       uuid        NOT NULL UNIQUE,
    topic_id         integer     NOT NULL,
    -- Queue number = shard modulo queue count; null spreads by log_id.
    shard            integer,
    half             boolean     NOT NULL,
    immunity_seconds integer,
    ledger_id        uuid,
    producer_group   text,
    checker          text,
    key              text        NOT NULL,
    tag              text        NOT NULL,
    content_type     text        NOT NULL,
    headers          jsonb,
    body             bytea       NOT NULL
);
-- The half scan and the sequencer's view of undecided FIFO messages read new half rows by snapshot.
CREATE INDEX commit_log_half_xid ON commit_log (xid, transaction_id) WHERE half;
-- Reading a window of time (reconciliation, rewind): nearly free to maintain, rows arrive in order of time.
CREATE INDEX commit_log_stored_at ON commit_log USING brin (stored_at) WITH (pages_per_range = 16);

-- The op topic: one row per decided transaction; the primary key lets the first decision win.
CREATE TABLE op_log (
    xid            xid8        NOT NULL DEFAULT pg_current_xact_id(),
    decided_at     timestamptz NOT NULL DEFAULT now(),
    transaction_id uuid        PRIMARY KEY,
    incarnation    integer     NOT NULL DEFAULT 1,
    decision       "char"      NOT NULL CHECK (decision IN ('C', 'R')),
    -- P producer, K check-back, O operator.
    decided_by     "char"      NOT NULL CHECK (decided_by IN ('P', 'K', 'O')),
    log_ids        bigint[]    NOT NULL
);
CREATE INDEX op_log_xid ON op_log (xid);
CREATE INDEX op_log_rolled_back ON op_log (decided_at) WHERE decision = 'R';

-- Per-queue index into the log. Only the sequencer's transaction appends; offsets are gapless.
CREATE TABLE consume_queue (
    queue_offset bigint   NOT NULL,
    log_id       bigint   NOT NULL,
    queue_id     integer  NOT NULL,
    -- 0 for the first delivery; n for the n-th retry of a consumer group.
    attempt      smallint NOT NULL,
    PRIMARY KEY (queue_id, queue_offset)
);
-- Where a message was queued (trace, reconciliation): nearly free to maintain, entries arrive in log order.
CREATE INDEX consume_queue_log_id ON consume_queue USING brin (log_id) WITH (pages_per_range = 16);

-- How far the sequencer has read. A second leader collides on the primary key.
CREATE TABLE tick (
    tick_id     bigint      PRIMARY KEY,
    snapshot    pg_snapshot NOT NULL,
    incarnation integer     NOT NULL,
    appended    integer     NOT NULL,
    -- The queues this tick appended to and their next offsets; all queues when `is_full`.
    queue_ids   integer[]   NOT NULL,
    heads       bigint[]    NOT NULL,
    is_full     boolean     NOT NULL,
    at          timestamptz NOT NULL DEFAULT clock_timestamp()
);

-- Decided, but waiting for an earlier message of its topic and key. Written and removed by the sequencer.
CREATE TABLE held (
    log_id   bigint      PRIMARY KEY,
    topic_id integer     NOT NULL,
    key      text        NOT NULL,
    held_at  timestamptz NOT NULL DEFAULT now()
);

-- Decided messages and retries that are not due yet. `queue_id` null: first delivery, to the message's own
-- topic; else the retry queue of a consumer group. The sequencer removes a row when it appends the entry.
CREATE TABLE scheduled (
    schedule_id bigint      GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    log_id      bigint      NOT NULL,
    due_at      timestamptz NOT NULL,
    queue_id    integer,
    attempt     smallint    NOT NULL DEFAULT 0,
    UNIQUE NULLS NOT DISTINCT (log_id, queue_id, attempt)
);
CREATE INDEX scheduled_due ON scheduled (due_at);

CREATE TABLE recalled (
    log_id      bigint      PRIMARY KEY,
    recalled_at timestamptz NOT NULL DEFAULT now()
);

-- ---------------------------------------------------------------------------------------------------
-- Check-back
-- ---------------------------------------------------------------------------------------------------

-- How far the half scan has read, by snapshot; the newest row counts.
CREATE TABLE half_scan (
    scan_id    bigint      PRIMARY KEY,
    snapshot   pg_snapshot NOT NULL,
    moved      integer     NOT NULL,
    scanned_at timestamptz NOT NULL DEFAULT now()
);

-- Half transactions the scan found undecided. Parked ones keep their row: an operator or a late end decides.
CREATE TABLE pending_check (
    transaction_id uuid        PRIMARY KEY,
    log_id         bigint      NOT NULL,
    producer_group text        NOT NULL,
    stored_at      timestamptz NOT NULL,
    immune_until   timestamptz NOT NULL,
    due_at         timestamptz NOT NULL,
    checks         integer     NOT NULL DEFAULT 0,
    parked_at      timestamptz,
    last_answer    text
);
CREATE INDEX pending_check_due ON pending_check (producer_group, due_at) WHERE parked_at IS NULL;
CREATE INDEX pending_check_parked ON pending_check (parked_at) WHERE parked_at IS NOT NULL;

CREATE TABLE check_history (
    transaction_id uuid        NOT NULL,
    checked_at     timestamptz NOT NULL DEFAULT clock_timestamp(),
    answer         text        NOT NULL,
    detail         text        NOT NULL
);
CREATE INDEX check_history_transaction ON check_history (transaction_id);

-- ---------------------------------------------------------------------------------------------------
-- Consumption
-- ---------------------------------------------------------------------------------------------------

CREATE TABLE consumer_group (
    group_id   integer     GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    name       text        NOT NULL UNIQUE,
    broadcast  boolean     NOT NULL DEFAULT false,
    paused     boolean     NOT NULL DEFAULT false,
    -- The inbox generation; raised to process messages again.
    generation integer     NOT NULL DEFAULT 1,
    created_at timestamptz NOT NULL DEFAULT now()
);

CREATE TABLE subscription (
    group_id      integer     NOT NULL REFERENCES consumer_group,
    topic_id      integer     NOT NULL REFERENCES topic,
    mode          text        NOT NULL,
    filter        text        NOT NULL DEFAULT '',
    subscribed_at timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (group_id, topic_id)
);

-- Live consumer instances, for rebalancing. Gone or expired: not alive.
CREATE TABLE consumer (
    instance_id uuid        NOT NULL,
    group_id    integer     NOT NULL REFERENCES consumer_group,
    topics      text[]      NOT NULL,
    host        text        NOT NULL,
    pid         integer     NOT NULL,
    joined_at   timestamptz NOT NULL DEFAULT now(),
    expires_at  timestamptz NOT NULL,
    PRIMARY KEY (instance_id, group_id)
);

-- Who may consume a queue for a group. `epoch` is the fencing token, raised with every change of owner.
CREATE TABLE queue_lease (
    group_id   integer     NOT NULL,
    queue_id   integer     NOT NULL,
    owner      uuid,
    epoch      bigint      NOT NULL,
    expires_at timestamptz NOT NULL,
    -- Set when an on_error=STOP handler stopped the queue; an operator's resume clears it.
    stopped    text,
    PRIMARY KEY (group_id, queue_id)
);

-- Who leads a role of the broker ('sequencer').
CREATE TABLE leader_lease (
    role       text        PRIMARY KEY,
    owner      uuid,
    epoch      bigint      NOT NULL,
    expires_at timestamptz NOT NULL
);

-- Consumer offsets, append-only: per group and queue the row with the greatest (epoch, ordinal) counts and
-- is never trimmed. The counters are totals since the group's start on that queue; in every row
-- next_offset - start_offset = handled + filtered + skipped + sent_back + dead + expired + moved.
CREATE TABLE consumer_offset (
    next_offset  bigint      NOT NULL,
    epoch        bigint      NOT NULL,
    ordinal      bigint      NOT NULL,
    handled      bigint      NOT NULL DEFAULT 0,
    filtered     bigint      NOT NULL DEFAULT 0,
    skipped      bigint      NOT NULL DEFAULT 0,
    sent_back    bigint      NOT NULL DEFAULT 0,
    dead         bigint      NOT NULL DEFAULT 0,
    expired      bigint      NOT NULL DEFAULT 0,
    -- Offset the group began at; lower if it was reset to before that.
    start_offset bigint      NOT NULL,
    -- Entries that resets passed over (or, negative, will have consumed twice).
    moved        bigint      NOT NULL DEFAULT 0,
    group_id     integer     NOT NULL,
    queue_id     integer     NOT NULL,
    stored_at    timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (group_id, queue_id, epoch, ordinal)
);

-- Every failed attempt with its error.
CREATE TABLE failure (
    group_id  integer     NOT NULL,
    log_id    bigint      NOT NULL,
    attempt   smallint    NOT NULL,
    error     text        NOT NULL,
    failed_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    PRIMARY KEY (group_id, log_id, attempt)
);

-- The dead letters ('%DLQ%group'): given up after the last attempt or by a permanent error.
CREATE TABLE dead_letter (
    group_id    integer     NOT NULL,
    log_id      bigint      NOT NULL,
    attempts    integer     NOT NULL,
    error       text        NOT NULL,
    dead_at     timestamptz NOT NULL DEFAULT now(),
    replayed_at timestamptz,
    PRIMARY KEY (group_id, log_id)
);

-- ---------------------------------------------------------------------------------------------------
-- What retention removed, so that totals stay countable
-- ---------------------------------------------------------------------------------------------------

CREATE TABLE pruned (
    topic_id    integer     NOT NULL,
    sent        bigint      NOT NULL DEFAULT 0,
    committed   bigint      NOT NULL DEFAULT 0,
    rolled_back bigint      NOT NULL DEFAULT 0,
    recalled    bigint      NOT NULL DEFAULT 0,
    queued      bigint      NOT NULL DEFAULT 0,
    pruned_at   timestamptz NOT NULL DEFAULT now()
);

-- ---------------------------------------------------------------------------------------------------
-- The contract of the tables for readers outside (Spark, dashboards): versioned views.
-- A later change adds *_v2 views beside these; it does not change them.
-- ---------------------------------------------------------------------------------------------------

-- `state`: committed, recalled (committed, then withdrawn before it was due), rolled_back, parked, undecided.
CREATE VIEW message_v1 AS
SELECT l.log_id, l.message_id, l.transaction_id, t.name AS topic, l.key, l.tag, l.content_type,
       l.headers::text AS headers, l.body, l.half, l.producer_group, l.born_at, l.stored_at, l.deliver_at,
       CASE WHEN r.recalled_at IS NOT NULL THEN 'recalled'
            WHEN o.decision = 'C' THEN 'committed'
            WHEN o.decision = 'R' THEN 'rolled_back'
            WHEN p.parked_at IS NOT NULL THEN 'parked'
            ELSE 'undecided' END AS state,
       o.decided_by::text AS decided_by, o.decided_at, p.parked_at, (h.log_id IS NOT NULL) AS held,
       (SELECT min(s.due_at) FROM scheduled s WHERE s.log_id = l.log_id AND s.queue_id IS NULL) AS scheduled_for,
       r.recalled_at
FROM commit_log l
JOIN topic t USING (topic_id)
LEFT JOIN op_log o USING (transaction_id)
LEFT JOIN pending_check p USING (transaction_id)
LEFT JOIN held h ON h.log_id = l.log_id
LEFT JOIN recalled r ON r.log_id = l.log_id;

CREATE VIEW queue_entry_v1 AS
SELECT q.queue_id, t.name AS topic, q.generation, q.number, e.queue_offset, e.log_id, e.attempt,
       g.name AS retry_group
FROM consume_queue e
JOIN queue q USING (queue_id)
JOIN topic t USING (topic_id)
LEFT JOIN consumer_group g ON g.group_id = t.retry_of;

CREATE VIEW group_v1 AS
SELECT g.name AS consumer_group, t.name AS topic, s.mode, s.filter, s.subscribed_at, g.paused, g.generation
FROM subscription s
JOIN consumer_group g USING (group_id)
JOIN topic t USING (topic_id);

CREATE VIEW offset_v1 AS
SELECT DISTINCT ON (o.group_id, o.queue_id)
       g.name AS consumer_group, t.name AS topic, o.queue_id, o.start_offset, o.next_offset, o.handled,
       o.filtered, o.skipped, o.sent_back, o.dead, o.expired, o.stored_at, o.moved
FROM consumer_offset o
JOIN consumer_group g USING (group_id)
JOIN queue q USING (queue_id)
JOIN topic t USING (topic_id)
ORDER BY o.group_id, o.queue_id, o.epoch DESC, o.ordinal DESC;

CREATE VIEW retry_v1 AS
SELECT g.name AS consumer_group, s.log_id, s.attempt, s.due_at
FROM scheduled s
JOIN queue q USING (queue_id)
JOIN topic t USING (topic_id)
JOIN consumer_group g ON g.group_id = t.retry_of;

CREATE VIEW dead_letter_v1 AS
SELECT g.name AS consumer_group, d.log_id, l.message_id, t.name AS topic, l.key, l.tag, l.stored_at, d.attempts,
       d.error, d.dead_at, d.replayed_at
FROM dead_letter d
JOIN consumer_group g USING (group_id)
JOIN commit_log l USING (log_id)
JOIN topic t USING (topic_id);

CREATE VIEW topic_v1 AS
SELECT t.name AS topic, t.message_types, t.queue_count, t.key_lock, t.retention_seconds, g.name AS retry_group,
       (SELECT max(p.pruned_at) FROM pruned p WHERE p.topic_id = t.topic_id) AS pruned_at, t.created_at
FROM topic t
LEFT JOIN consumer_group g ON g.group_id = t.retry_of;

-- How far a message got with each subscribed group. `state`: dead (and not replayed), retrying (waits for its next
-- attempt), unqueued (undecided, held, scheduled or not sequenced yet), waiting (queued, not consumed yet),
-- passed (the group's offset is beyond every entry of it: handled, filtered, skipped, or before the group's start).
CREATE VIEW delivery_v1 AS
SELECT g.name AS consumer_group, t.name AS topic, l.log_id, l.message_id, l.key, l.tag, l.stored_at,
       CASE WHEN EXISTS (SELECT FROM dead_letter d
                         WHERE d.group_id = g.group_id AND d.log_id = l.log_id AND d.replayed_at IS NULL) THEN 'dead'
            WHEN EXISTS (SELECT FROM scheduled s
                         JOIN queue q ON q.queue_id = s.queue_id
                         JOIN topic rt ON rt.topic_id = q.topic_id AND rt.retry_of = g.group_id
                         WHERE s.log_id = l.log_id) THEN 'retrying'
            WHEN e.entries = 0 THEN 'unqueued'
            WHEN e.consumed < e.entries THEN 'waiting'
            ELSE 'passed' END AS state,
       e.last_consumed_at
FROM subscription u
JOIN consumer_group g USING (group_id)
JOIN topic t USING (topic_id)
JOIN commit_log l USING (topic_id)
CROSS JOIN LATERAL (
    SELECT count(*) AS entries, count(*) FILTER (WHERE c.queue_offset < o.next_offset) AS consumed,
           max(o.stored_at) FILTER (WHERE c.queue_offset < o.next_offset) AS last_consumed_at
    FROM consume_queue c
    JOIN queue q USING (queue_id)
    JOIN topic qt ON qt.topic_id = q.topic_id
    LEFT JOIN LATERAL (SELECT f.next_offset, f.stored_at
                       FROM consumer_offset f
                       WHERE f.group_id = g.group_id AND f.queue_id = c.queue_id
                       ORDER BY f.epoch DESC, f.ordinal DESC
                       LIMIT 1) o ON true
    WHERE c.log_id = l.log_id AND (qt.topic_id = l.topic_id OR qt.retry_of = g.group_id)
) e
-- Broadcast groups store no positions: how far they are is not known here.
WHERE NOT g.broadcast;

-- ---------------------------------------------------------------------------------------------------
-- First rows: nothing is sequenced, nothing is scanned
-- ---------------------------------------------------------------------------------------------------

INSERT INTO broker (system_identifier, timeline)
SELECT c.system_identifier::text, ('x' || substr(pg_walfile_name(pg_current_wal_insert_lsn()), 1, 8))::bit(32)::integer
FROM pg_control_system() c;

INSERT INTO tick (tick_id, snapshot, incarnation, appended, queue_ids, heads, is_full)
VALUES (0, '1:1:', 1, 0, '{}', '{}', true);

INSERT INTO half_scan (scan_id, snapshot, moved) VALUES (0, '1:1:', 0);
