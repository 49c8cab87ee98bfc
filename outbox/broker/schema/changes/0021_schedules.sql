-- Change 21: schedules, by which the leader publishes messages.

CREATE TABLE IF NOT EXISTS schedule (
    producer_group  text        NOT NULL,
    name            text        NOT NULL,
    expression      text        NOT NULL,
    timezone        text        NOT NULL,
    missed          text        NOT NULL CHECK (missed IN ('coalesce', 'catch_up', 'skip')),
    topic           text        NOT NULL,
    content_type    text        NOT NULL,
    body            bytea       NOT NULL,
    declared_at     timestamptz NOT NULL,
    next_at         timestamptz NOT NULL,
    last_at         timestamptz,
    last_message_id uuid,
    paused_at       timestamptz,
    error           text,
    PRIMARY KEY (producer_group, name)
);
