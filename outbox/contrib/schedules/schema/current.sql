-- The table of schedules, as it is now (outbox/contrib/schedules/schedule.py).

-- Schedules: the leader publishes a message at each due moment. The service that declares a schedule renews
-- `declared_at`. One transaction stores the message of a due moment and moves `next_at`.
CREATE TABLE schedule (
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
