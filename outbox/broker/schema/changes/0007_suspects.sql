-- Change 7: messages in quarantine, and pauses while a service is down.

CREATE TABLE suspect (
    group_id     integer     NOT NULL,
    log_id       bigint      NOT NULL,
    call_size    integer     NOT NULL,
    deaths       integer     NOT NULL DEFAULT 0,
    hung         boolean     NOT NULL,
    evidence     text        NOT NULL,
    suspected_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    seen_at      timestamptz NOT NULL DEFAULT clock_timestamp(),
    due_at       timestamptz NOT NULL DEFAULT clock_timestamp(),
    tried_by     uuid,
    tried_on     text,
    PRIMARY KEY (group_id, log_id)
);
CREATE INDEX suspect_tried_by ON suspect (tried_by) WHERE tried_by IS NOT NULL;

CREATE TABLE suspect_vanished (
    group_id    integer     NOT NULL,
    log_id      bigint      NOT NULL,
    instance_id uuid        NOT NULL,
    host        text        NOT NULL,
    vanished_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    PRIMARY KEY (group_id, log_id, instance_id),
    FOREIGN KEY (group_id, log_id) REFERENCES suspect ON DELETE CASCADE
);

CREATE TABLE outage (
    instance_id uuid        NOT NULL,
    group_id    integer     NOT NULL,
    topic_id    integer     NOT NULL,
    error       text        NOT NULL,
    since       timestamptz NOT NULL DEFAULT clock_timestamp(),
    seen_at     timestamptz NOT NULL DEFAULT clock_timestamp(),
    PRIMARY KEY (instance_id, group_id, topic_id)
);
