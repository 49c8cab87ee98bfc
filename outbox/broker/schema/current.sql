-- The tables of the broker, as they are now. A new database gets this file and the functions in functions/; a database
-- of an earlier release gets the files in changes/. A new column comes last in its table, where the change adds it.
--
-- Functions look up names where these tables are, whatever the session's search_path. If the parameters of a released
-- function change, the function gets a new name, because the code of the release before still calls the old one.
--
-- Executed with search_path set to the broker's schema. docs/maintainers/storage.md says which process writes and
-- deletes the rows of each table.
--
-- The tables that every message passes through (commit_log, op_log, consume_queue, tick, consumer_offset) are
-- append-only: rows are inserted and later deleted, and readers only scan forward. Only actions of
-- operators update rows, such as the removal of a person's data: they replace the content of messages in commit_log.

-- ---------------------------------------------------------------------------------------------------
-- The broker itself
-- ---------------------------------------------------------------------------------------------------

-- One row.
CREATE TABLE broker (
    singleton            boolean     PRIMARY KEY DEFAULT true CHECK (singleton),
    broker_id            uuid        NOT NULL DEFAULT gen_random_uuid(),
    -- Raised when transaction ids may have started over (restore, upgrade, failover).
    incarnation          integer     NOT NULL DEFAULT 1,
    system_identifier    text        NOT NULL,
    timeline             integer     NOT NULL,
    -- An operator has switched transactional messages off.
    reject_transactional boolean     NOT NULL DEFAULT false,
    created_at           timestamptz NOT NULL DEFAULT now()
);

-- The versions of the tables: one row for those of the core ('core'), and one for those of each part (outbox/hooks.py,
-- add_schema). Each service installs the parts that it uses, so code must expect parts here that it lacks.
CREATE TABLE schema_version (
    name         text        PRIMARY KEY,
    -- 1 for current.sql, then the number of the last file of changes/ that was applied. Code needs the version that it
    -- comes with, and accepts later ones.
    version      integer     NOT NULL,
    applied_at   timestamptz NOT NULL DEFAULT now(),
    -- The lowest version of code that works with these tables; earlier code refuses them. Only a change that breaks the
    -- code of the release before raises it.
    minimum_code integer     NOT NULL DEFAULT 1,
    -- The leader does work of the part, so a process that lacks the part leads only while no process with it does.
    leads        boolean     NOT NULL,
    -- The names of the tables, views, sequences and functions that the files have created.
    objects      text[]      NOT NULL DEFAULT '{}'
);

-- Events for an operator: contradicting or refused ends, wrong ledgers, parked transactions, deaths of processes.
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
    -- The layout of the queues that new messages go to; a change of the queue count starts the next layout.
    layout            integer     NOT NULL DEFAULT 1,
    -- FIFO only: publish takes a lock per key, so that log order is the order of local commits.
    key_lock          boolean     NOT NULL DEFAULT true,
    -- FIFO only: whether a parked transaction keeps its key held ('hold') or lets it continue ('release').
    on_park           text        NOT NULL DEFAULT 'hold' CHECK (on_park IN ('hold', 'release')),
    retention_seconds bigint      NOT NULL DEFAULT 259200,
    -- A retry topic ('%RETRY%group'): the consumer group whose retry queues it has.
    retry_of          integer,
    created_at        timestamptz NOT NULL DEFAULT now(),
    -- A deleted topic takes no messages; retention removes those it has. The row stays, because a process that does not
    -- know of the deletion may still send. Declaring the topic again takes it back.
    deleted_at        timestamptz,
    -- The greatest number of messages that a group may be behind; null: no limit.
    backlog_limit     bigint,
    -- What publish does while a limit is exceeded.
    on_limit          text        NOT NULL DEFAULT 'refuse' CHECK (on_limit IN ('refuse', 'warn')),
    -- Whether the limit is exceeded, and by which group; the leader writes it. Publishers read it with the topic.
    over_limit        jsonb,
    -- The installation makes an index of the topic's keys in commit_log (schema/key_index.py).
    searchable        boolean     NOT NULL DEFAULT false
);
-- All FIFO topics, which every tick reads, without the other topics.
CREATE INDEX topic_fifo ON topic (topic_id) WHERE 'FIFO' = ANY (message_types);

CREATE TABLE queue (
    queue_id   integer GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    topic_id   integer NOT NULL REFERENCES topic,
    layout     integer NOT NULL DEFAULT 1,
    number     integer NOT NULL,
    -- The final head; the leader stores it once an older layout gets no more messages.
    closed_at  bigint,
    -- Set with a change of the queue count, until the leader has written closed_at.
    closing    boolean NOT NULL DEFAULT false,
    -- Retention has removed the offsets below.
    floor      bigint  NOT NULL DEFAULT 0,
    UNIQUE (topic_id, layout, number)
);
COMMENT ON COLUMN queue.number IS
    'In a retry topic (retry_of): the id of the topic whose failed messages the queue carries';
CREATE INDEX queue_closing ON queue (queue_id) WHERE closing;

-- ---------------------------------------------------------------------------------------------------
-- The log
-- ---------------------------------------------------------------------------------------------------

-- All messages. Every body is stored once; rows with `half` are half messages.
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
    key              text        NOT NULL,
    tag              text        NOT NULL,
    content_type     text        NOT NULL,
    headers          jsonb,
    body             bytea       NOT NULL
);
-- By default, autovacuum waits until a fifth of a table is dead. With a hundred million messages a day and three days of
-- retention, that is 60 million dead rows, whose space is not used again before. Vacuum reads the indexes completely, so
-- a smaller share than this would cost more than it saves. The same holds for op_log and consume_queue.
ALTER TABLE commit_log SET (autovacuum_vacuum_scale_factor = 0.05);
-- The half scan and the leader's look at undecided FIFO messages read new half rows by snapshot.
CREATE INDEX commit_log_half_xid ON commit_log (xid, transaction_id) WHERE half;
-- Reading a window of time (reconciliation, search). It costs 72 bytes of WAL per transaction once retention has freed
-- pages, because each new row then raises the summary of an old range (docs/decisions/199).
CREATE INDEX commit_log_stored_at ON commit_log USING brin (stored_at) WITH (pages_per_range = 16);

-- One row per decided transaction; the primary key lets the first decision win. The decision COMMIT has a row here also
-- where the message's row could show it (docs/decisions/199).
CREATE TABLE op_log (
    xid            xid8        NOT NULL DEFAULT pg_current_xact_id(),
    decided_at     timestamptz NOT NULL DEFAULT now(),
    transaction_id uuid        PRIMARY KEY,
    -- C COMMIT, R ROLLBACK. There is no CHECK, because each INSERT would prepare its expression anew: 5 to 14 % of the
    -- CPU of a publish call (docs/decisions/199).
    decision       "char"      NOT NULL,
    -- P producer, K check-back, O operator.
    decided_by     "char"      NOT NULL,
    log_ids        bigint[]    NOT NULL,
    -- Committed without waiting for the WAL flush: a crash may lose the decision although a tick could see it. A tick
    -- that reads such a row waits for the flush, which makes both durable.
    relaxed        boolean     DEFAULT (current_setting('synchronous_commit') NOT IN ('on', 'remote_apply'))
);
ALTER TABLE op_log SET (autovacuum_vacuum_scale_factor = 0.05);
CREATE INDEX op_log_xid ON op_log (xid);
CREATE INDEX op_log_rolled_back ON op_log (decided_at) WHERE decision = 'R';

-- Per-queue index into the log. Only the leader's tick appends; offsets are gapless.
CREATE TABLE consume_queue (
    queue_offset bigint   NOT NULL,
    log_id       bigint   NOT NULL,
    queue_id     integer  NOT NULL,
    -- 0 for the first delivery; n for the n-th retry of a consumer group.
    attempt      smallint NOT NULL,
    -- A message may be queued long after it was stored: decided late, delayed, held.
    queued_at    timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (queue_id, queue_offset)
);
ALTER TABLE consume_queue SET (autovacuum_vacuum_scale_factor = 0.05);
-- Where a message was queued (trace, recall, reconciliation). It costs 72 bytes of WAL per entry once retention has
-- freed pages, as commit_log_stored_at does.
CREATE INDEX consume_queue_log_id ON consume_queue USING brin (log_id) WITH (pages_per_range = 16);

-- How far the leader has read. A second leader collides on the primary key.
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

-- Decided, but waiting for an earlier message of its topic and key.
CREATE TABLE held (
    log_id   bigint      PRIMARY KEY,
    topic_id integer     NOT NULL,
    key      text        NOT NULL,
    held_at  timestamptz NOT NULL DEFAULT now()
);

-- Decided messages and retries that are not due yet. `queue_id` null: first delivery, to the message's own topic; else
-- the retry queue of a consumer group. The leader removes a row when it appends the entry. `claimed`: the handler of the
-- message runs without a transaction; the row delivers the message again if the process dies (docs/decisions/203).
CREATE TABLE scheduled (
    schedule_id bigint      GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    log_id      bigint      NOT NULL,
    due_at      timestamptz NOT NULL,
    queue_id    integer,
    attempt     smallint    NOT NULL DEFAULT 0,
    claimed     boolean     NOT NULL DEFAULT false,
    UNIQUE NULLS NOT DISTINCT (log_id, queue_id, attempt)
);
CREATE INDEX scheduled_due ON scheduled (due_at);
-- Messages that have failed at least twice (condition failing_messages): few, also if millions are delayed.
CREATE INDEX scheduled_failing ON scheduled (queue_id, due_at) WHERE attempt > 1 AND NOT claimed;

-- Messages that were taken back before their first delivery.
CREATE TABLE recalled (
    log_id      bigint      PRIMARY KEY,
    recalled_at timestamptz NOT NULL DEFAULT now()
);

-- Retries that were taken back: the group does not get the message again. Rows go with their messages.
CREATE TABLE recalled_retry (
    group_id    integer     NOT NULL,
    log_id      bigint      NOT NULL,
    attempt     smallint    NOT NULL,
    recalled_at timestamptz NOT NULL DEFAULT now()
);
CREATE INDEX recalled_retry_message ON recalled_retry (log_id);
-- Without a primary key: if a publication has all tables, PostgreSQL otherwise refuses that retention deletes rows.
ALTER TABLE recalled_retry REPLICA IDENTITY FULL;

-- One row per incarnation: when it began, all decisions were compared with all queues, and transaction ids of another
-- server were taken out of op_log.
CREATE TABLE resync (
    incarnation  integer     PRIMARY KEY,
    reason       text        NOT NULL,
    -- What the comparison could see. The ticks that follow read what the transactions then in progress commit later.
    snapshot     pg_snapshot NOT NULL,
    at           timestamptz NOT NULL DEFAULT now(),
    -- The last life whose beginning this comparison has seen.
    life_ordinal bigint      NOT NULL DEFAULT 0
);

-- ---------------------------------------------------------------------------------------------------
-- Lives of the server (docs/decisions/145)
-- ---------------------------------------------------------------------------------------------------

-- Each life begins with the first connection of the broker after a start, crash, promotion or restore.
CREATE TABLE life (
    life_id      uuid        PRIMARY KEY,
    ordinal      bigint      GENERATED ALWAYS AS IDENTITY UNIQUE,
    began_at     timestamptz NOT NULL DEFAULT clock_timestamp(),
    server       text        NOT NULL,
    -- The next offsets of all queues that had any, before the first tick of this life.
    queue_ids    integer[]   NOT NULL,
    heads        bigint[]    NOT NULL,
    -- The xmin of this row and of its row in life_sign. A row written by a restore has another xmin, also after a
    -- TRUNCATE and a data-only restore.
    mark         xid,
    -- Where the rows of this life were written.
    database_oid oid,
    table_oid    oid,
    -- The tables were copied since the previous life: by a dump, a template, or rows that were loaded again.
    is_copy      boolean     NOT NULL DEFAULT false,
    -- The time at which the newest message in the log was stored, at the beginning of this life.
    stored_until timestamptz
);

-- The present life. Unlogged: empty after every crash recovery, promotion and restore of a backup, also if only a
-- backend was killed and the postmaster survived, which pg_postmaster_start_time() does not show.
CREATE UNLOGGED TABLE life_sign (
    life_id uuid NOT NULL,
    server  text NOT NULL
);

-- ---------------------------------------------------------------------------------------------------
-- Check-back and producers
-- ---------------------------------------------------------------------------------------------------

-- How far the half scan has read, by snapshot; the newest row counts.
CREATE TABLE half_scan (
    scan_id  bigint      PRIMARY KEY,
    snapshot pg_snapshot NOT NULL
);

-- The producer groups of each database role that has the role publish. Other roles with INSERT on op_log need no row. A
-- name instead of an oid: a dump can be restored where the role does not exist yet (docs/decisions/235).
CREATE TABLE publisher (
    role           name NOT NULL,
    producer_group text NOT NULL,
    PRIMARY KEY (producer_group, role)
);

-- Half transactions that the scan found undecided. Parked ones keep their row: an operator or a late end decides.
CREATE TABLE pending_check (
    transaction_id uuid        PRIMARY KEY,
    log_id         bigint      NOT NULL,
    producer_group text        NOT NULL,
    stored_at      timestamptz NOT NULL,
    immune_until   timestamptz NOT NULL,
    due_at         timestamptz NOT NULL,
    checks         integer     NOT NULL DEFAULT 0,
    parked_at      timestamptz,
    last_answer    text,
    -- Why it was parked (outbox.transaction.ParkReason).
    park_reason    text,
    -- When it was last handed to a producer of its group.
    asked_at       timestamptz
);
CREATE INDEX pending_check_due ON pending_check (producer_group, due_at) WHERE parked_at IS NULL;
CREATE INDEX pending_check_parked ON pending_check (parked_at) WHERE parked_at IS NOT NULL;
CREATE INDEX pending_check_ask_parked ON pending_check (producer_group, due_at) WHERE parked_at IS NOT NULL;

CREATE TABLE check_history (
    transaction_id uuid        NOT NULL,
    checked_at     timestamptz NOT NULL DEFAULT clock_timestamp(),
    answer         text        NOT NULL,
    detail         text        NOT NULL
);
CREATE INDEX check_history_transaction ON check_history (transaction_id);
ALTER TABLE check_history REPLICA IDENTITY FULL; -- as recalled_retry

-- When each producer group last asked for its checks, to within some seconds: shows whether a process of it runs.
CREATE TABLE producer_group (
    name    text        PRIMARY KEY,
    seen_at timestamptz NOT NULL
);

-- When the periodic passes of each producer group last began. Several processes may drive them (every worker, beat, a
-- cron job); a process that finds that a pass has just begun leaves it out.
CREATE TABLE periodic_pass (
    producer_group   text             NOT NULL,
    name             text             NOT NULL,
    interval_seconds double precision NOT NULL,
    began_at         timestamptz      NOT NULL,
    PRIMARY KEY (producer_group, name)
);

-- Producers with a transactional id: the newest instance fences the older ones.
CREATE TABLE producer_epoch (
    producer_group   text        NOT NULL,
    transactional_id text        NOT NULL,
    -- Raised by each instance that takes the id over; messages with a lower epoch are refused.
    epoch            bigint      NOT NULL,
    PRIMARY KEY (producer_group, transactional_id)
);

-- Half transactions of such producers, until they are decided: a newer instance waits for them.
CREATE TABLE fenced_half (
    transaction_id   uuid   PRIMARY KEY,
    producer_group   text   NOT NULL,
    transactional_id text   NOT NULL,
    epoch            bigint NOT NULL
);
CREATE INDEX fenced_half_producer ON fenced_half (producer_group, transactional_id, epoch);

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
    -- How many retries were recalled: a term of the group's conservation, kept when retention removes their rows.
    recalled      bigint      NOT NULL DEFAULT 0,
    -- The same for dead letters that were discarded, and for repeated entries of messages that wait already or are dead.
    discarded     bigint      NOT NULL DEFAULT 0,
    -- The same for messages whose time limit was over before an attempt.
    timed_out     bigint      NOT NULL DEFAULT 0,
    PRIMARY KEY (group_id, topic_id)
);

-- Live consumer instances, for rebalancing. An instance that is missing or has expired is not alive.
CREATE TABLE consumer (
    instance_id uuid        NOT NULL,
    group_id    integer     NOT NULL REFERENCES consumer_group,
    topics      text[]      NOT NULL,
    host        text        NOT NULL,
    pid         integer     NOT NULL,
    -- By it, another process of the machine recognises that this one has ended; '' if the system cannot say.
    process     text        NOT NULL DEFAULT '',
    joined_at   timestamptz NOT NULL DEFAULT now(),
    expires_at  timestamptz NOT NULL,
    PRIMARY KEY (instance_id, group_id)
);

-- What each consumer process last wrote about itself at the renewal of its leases, for the operations page
-- (docs/decisions/232).
CREATE UNLOGGED TABLE consumer_process (
    instance_id uuid        PRIMARY KEY,
    version     text        NOT NULL,
    seen_at     timestamptz NOT NULL,
    -- Handler calls that ran at `seen_at`, and the longest of them.
    calls       integer     NOT NULL,
    longest     jsonb       NOT NULL,
    -- Whether the process takes no more messages and ends its running calls.
    draining    boolean     NOT NULL DEFAULT false
);

-- Which instance may consume a queue for a group. `epoch` is the fencing token, raised with every change of owner.
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

-- Which process leads ('sequencer').
CREATE TABLE leader_lease (
    role       text        PRIMARY KEY,
    owner      uuid,
    epoch      bigint      NOT NULL,
    expires_at timestamptz NOT NULL,
    -- The owner leads only while the process that should lead does not. That process takes the lease from it before the
    -- lease expires (docs/decisions/163).
    stands_in  boolean     NOT NULL DEFAULT false,
    -- The parts whose work the owner should do as the leader, and which it lacks. Such an owner gives way.
    lacks      text[]      NOT NULL DEFAULT '{}'
);

-- Consumer offsets: per group and queue the row with the greatest (epoch, ordinal) counts and is never removed by
-- retention. The counters are totals since the group's start on that queue (`dead`: given up, as dead letters or because
-- the message timed out); in every row
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

-- Entries that were sent to the retry queue or the dead letters before the offset passed them. If their consumer dies
-- in between, the next owner of the queue passes them; otherwise it would deliver and count them a second time.
CREATE TABLE finished_ahead (
    group_id     integer NOT NULL,
    queue_id     integer NOT NULL,
    queue_offset bigint  NOT NULL,
    -- In the dead letters, or timed out; else in the retry queue.
    is_dead      boolean NOT NULL,
    PRIMARY KEY (group_id, queue_id, queue_offset)
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
    group_id     integer     NOT NULL,
    log_id       bigint      NOT NULL,
    attempts     integer     NOT NULL,
    error        text        NOT NULL,
    dead_at      timestamptz NOT NULL DEFAULT now(),
    -- Settled: replayed, or discarded if `discarded_at` is set too.
    replayed_at  timestamptz,
    discarded_at timestamptz,
    PRIMARY KEY (group_id, log_id)
);

-- Messages that a group did not handle, because their time limit was over before an attempt (docs/decisions/207). One
-- row per queue entry; a reset of the group may add a second one. Rows go with their messages.
CREATE TABLE timed_out (
    group_id     integer     NOT NULL,
    log_id       bigint      NOT NULL,
    queue_id     integer     NOT NULL,
    queue_offset bigint      NOT NULL,
    timed_out_at timestamptz NOT NULL DEFAULT clock_timestamp()
);
CREATE INDEX timed_out_message ON timed_out (log_id);
ALTER TABLE timed_out REPLICA IDENTITY FULL; -- as recalled_retry

-- Messages in quarantine: their process died or hung while it handled them. A group has one trial at a time: the
-- messages of a batch are tried by halves until one is alone. A handled message is removed. The third death of a process
-- in a trial of the message alone makes it a dead letter.
CREATE TABLE quarantined_message (
    group_id       integer     NOT NULL,
    log_id         bigint      NOT NULL,
    -- Size of the last call whose process died: the next trial takes half as many messages together.
    call_size      integer     NOT NULL,
    -- How often its process died while it was handled alone, as the parent process saw, or its trial timed out.
    deaths         integer     NOT NULL DEFAULT 0,
    -- It hung and has killed no process so far: others may run beside it.
    hung           boolean     NOT NULL,
    evidence       text        NOT NULL,
    quarantined_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    seen_at        timestamptz NOT NULL DEFAULT clock_timestamp(),
    due_at         timestamptz NOT NULL DEFAULT clock_timestamp(),
    -- The instance that tries it now, and its host; committed before its handler is called.
    tried_by       uuid,
    tried_on       text,
    PRIMARY KEY (group_id, log_id)
);
CREATE INDEX quarantined_message_tried_by ON quarantined_message (tried_by) WHERE tried_by IS NOT NULL;

-- Instances that stopped their heartbeat while they tried a message alone; a new heartbeat removes the row.
CREATE TABLE vanished_trial (
    group_id    integer     NOT NULL,
    log_id      bigint      NOT NULL,
    instance_id uuid        NOT NULL,
    host        text        NOT NULL,
    PRIMARY KEY (group_id, log_id, instance_id),
    FOREIGN KEY (group_id, log_id) REFERENCES quarantined_message ON DELETE CASCADE
);

-- Subscriptions that pause in one instance, because their handlers fail one after another with the same error. `since`
-- is the time of the first failure.
CREATE TABLE outage (
    instance_id uuid        NOT NULL,
    group_id    integer     NOT NULL,
    topic_id    integer     NOT NULL,
    error       text        NOT NULL,
    since       timestamptz NOT NULL DEFAULT clock_timestamp(),
    -- The time of the last call that failed.
    seen_at     timestamptz NOT NULL DEFAULT clock_timestamp(),
    -- The end of the pause: a call then tests whether the outage is over.
    next_call_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    PRIMARY KEY (instance_id, group_id, topic_id)
);

-- ---------------------------------------------------------------------------------------------------
-- Results of background work, so that a status, a metric or a page reads one row at any size
-- ---------------------------------------------------------------------------------------------------

-- Counts, stored by the leader every few seconds. Rows are appended and trimmed: an updated row would leave dead
-- versions behind a transaction that is held open elsewhere.
CREATE TABLE summary (
    summary_id   bigint           GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    at           timestamptz      NOT NULL DEFAULT clock_timestamp(),
    took_seconds double precision NOT NULL,
    facts        jsonb            NOT NULL,
    -- Per group the counters from which rates are computed: small, because some minutes of them are read at once.
    totals       jsonb            NOT NULL
);

-- Audits of conservation: they count every message, so they run rarely and their result is kept.
CREATE TABLE audit (
    audit_id     bigint           GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    at           timestamptz      NOT NULL DEFAULT clock_timestamp(),
    took_seconds double precision NOT NULL,
    -- The equations that do not hold, in words; empty when all do.
    differences  text[]           NOT NULL,
    facts        jsonb            NOT NULL
);

-- Totals of messages that retention removed.
CREATE TABLE pruned (
    topic_id    integer     NOT NULL,
    sent        bigint      NOT NULL DEFAULT 0,
    committed   bigint      NOT NULL DEFAULT 0,
    rolled_back bigint      NOT NULL DEFAULT 0,
    recalled    bigint      NOT NULL DEFAULT 0,
    queued      bigint      NOT NULL DEFAULT 0,
    pruned_at   timestamptz NOT NULL DEFAULT now()
);
ALTER TABLE pruned REPLICA IDENTITY FULL; -- as recalled_retry

-- How far ledger and inbox of each service are pruned. Both are in the databases of applications, which the broker
-- cannot read, so the pass that prunes them stores its progress here.
CREATE TABLE pruned_table (
    producer_group text             NOT NULL,
    -- Of the application's DATABASES.
    alias          text             NOT NULL,
    -- The table.
    name           text             NOT NULL,
    -- Rows are kept for this many seconds; younger ones are not looked at.
    keep_seconds   double precision NOT NULL,
    -- All older rows were looked at, and the unneeded ones were removed.
    pruned_to      timestamptz      NOT NULL,
    PRIMARY KEY (producer_group, alias, name)
);

-- Results of the last comparison of the application's databases with the broker. The application runs comparisons,
-- because only it can reach both sides.
CREATE TABLE comparison (
    -- 'ledger': committed transactions that the broker does not know. 'decision': transactions committed here that the
    -- ledger does not know. 'inbox': messages that a group has passed and the inbox does not know.
    kind          text        NOT NULL CHECK (kind IN ('ledger', 'decision', 'inbox')),
    -- The producer group, or the consumer group.
    subject       text        NOT NULL,
    -- Only of an inbox.
    topic         text        NOT NULL DEFAULT '',
    alias         text        NOT NULL,
    life_id       uuid        NOT NULL,
    compared_at   timestamptz NOT NULL DEFAULT now(),
    -- The start of the next comparison.
    state         jsonb       NOT NULL DEFAULT '{}',
    missing       bigint      NOT NULL DEFAULT 0,
    first_at      timestamptz,
    last_at       timestamptz,
    -- Twenty at most.
    ids           uuid[]      NOT NULL DEFAULT '{}',
    -- In this span data was lost for which no proof is left: the ledger was pruned past it.
    unproven_from timestamptz,
    unproven_to   timestamptz,
    PRIMARY KEY (kind, subject, topic, alias)
);

-- Each transaction that one side has and the other has not. The status leaves out those that an operator has settled.
CREATE TABLE missing_transaction (
    transaction_id uuid        NOT NULL,
    kind           text        NOT NULL CHECK (kind IN ('ledger', 'decision')),
    producer_group text        NOT NULL,
    alias          text        NOT NULL,
    at             timestamptz NOT NULL,
    settled_at     timestamptz,
    PRIMARY KEY (transaction_id, kind)
);
CREATE INDEX missing_transaction_open ON missing_transaction (kind, producer_group, alias, transaction_id)
WHERE settled_at IS NULL;

-- ---------------------------------------------------------------------------------------------------
-- Views
-- ---------------------------------------------------------------------------------------------------

-- The next offset of each queue: behind its last entry, or at its floor, which retention raises when it removes
-- entries.
CREATE VIEW queue_head AS
SELECT queue.queue_id, greatest(queue.floor, coalesce(last_entry.queue_offset + 1, 0)) AS head
FROM queue
LEFT JOIN LATERAL (
    SELECT entry.queue_offset FROM consume_queue entry
    -- From the floor on: entries removed below it may still be there as dead rows.
    WHERE entry.queue_id = queue.queue_id AND entry.queue_offset >= queue.floor
    ORDER BY entry.queue_offset DESC LIMIT 1
) AS last_entry ON true;

-- The views below are the contract for readers outside (Spark, dashboards). A later change adds *_v2 views beside these
-- and does not change them.

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
SELECT q.queue_id, t.name AS topic, q.layout, q.number, e.queue_offset, e.log_id, e.attempt,
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

CREATE VIEW timed_out_v1 AS
SELECT g.name AS consumer_group, o.log_id, l.message_id, t.name AS topic, l.key, l.tag, l.stored_at,
       max(o.timed_out_at) AS timed_out_at
FROM timed_out o
JOIN consumer_group g USING (group_id)
JOIN commit_log l USING (log_id)
JOIN topic t USING (topic_id)
GROUP BY g.group_id, o.log_id, l.log_id, t.topic_id;

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

-- How a transaction was asked for, and how handlers failed.
CREATE VIEW check_v1 AS
SELECT transaction_id, checked_at, answer, detail FROM check_history;

CREATE VIEW failure_v1 AS
SELECT g.name AS consumer_group, f.log_id, f.attempt, f.failed_at, f.error
FROM failure f
JOIN consumer_group g USING (group_id);

-- ---------------------------------------------------------------------------------------------------
-- First rows: no decision is sequenced, no half is scanned. install.py adds the row of schema_version.
-- ---------------------------------------------------------------------------------------------------

INSERT INTO broker (system_identifier, timeline)
SELECT c.system_identifier::text, ('x' || substr(pg_walfile_name(pg_current_wal_insert_lsn()), 1, 8))::bit(32)::integer
FROM pg_control_system() c;

INSERT INTO tick (tick_id, snapshot, incarnation, appended, queue_ids, heads, is_full)
VALUES (0, '1:1:', 1, 0, '{}', '{}', true);

INSERT INTO half_scan (scan_id, snapshot) VALUES (0, '1:1:');

INSERT INTO resync (incarnation, reason, snapshot) VALUES (1, 'installed', '1:1:');
