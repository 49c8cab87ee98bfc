-- Change 7: a message whose handler kills or hangs its process is found out, and what is away is named.

-- Messages that were being handled when a process died or hung. Each is tried alone, one of a group at a time; one that
-- comes back is forgotten, and the third death alone makes it a dead letter.
CREATE TABLE suspect (
    group_id     integer     NOT NULL,
    log_id       bigint      NOT NULL,
    -- Of the last call it did not survive: half as many are tried together the next time.
    call_size    integer     NOT NULL,
    -- How often its process died while it was handled alone, as its parent saw.
    deaths       integer     NOT NULL DEFAULT 0,
    -- It hung and killed nothing so far: others may run beside it.
    hung         boolean     NOT NULL,
    evidence     text        NOT NULL,
    suspected_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    seen_at      timestamptz NOT NULL DEFAULT clock_timestamp(),
    due_at       timestamptz NOT NULL DEFAULT clock_timestamp(),
    -- The instance that tries it now; committed before its handler is called.
    tried_by     uuid,
    tried_on     text,
    PRIMARY KEY (group_id, log_id)
);
CREATE INDEX suspect_tried_by ON suspect (tried_by) WHERE tried_by IS NOT NULL;

-- Instances that were not heard of any more while they tried a suspect alone; forgotten when they are heard of again.
CREATE TABLE suspect_vanished (
    group_id    integer     NOT NULL,
    log_id      bigint      NOT NULL,
    instance_id uuid        NOT NULL,
    host        text        NOT NULL,
    vanished_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    PRIMARY KEY (group_id, log_id, instance_id),
    FOREIGN KEY (group_id, log_id) REFERENCES suspect ON DELETE CASCADE
);

-- Subscriptions that pause in one instance, because what their handlers need is away.
CREATE TABLE outage (
    instance_id uuid        NOT NULL,
    group_id    integer     NOT NULL,
    topic_id    integer     NOT NULL,
    error       text        NOT NULL,
    since       timestamptz NOT NULL DEFAULT clock_timestamp(),
    -- Of the last call that failed.
    seen_at     timestamptz NOT NULL DEFAULT clock_timestamp(),
    PRIMARY KEY (instance_id, group_id, topic_id)
);
