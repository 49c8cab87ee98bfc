-- The table of events, as it is now (outbox/contrib/events/waiting.py).

-- Versions of events that only newer code knows, and whose messages wait in one instance (docs/decisions/251).
CREATE TABLE unknown_version (
    instance_id uuid        NOT NULL,
    group_id    integer     NOT NULL,
    topic_id    integer     NOT NULL,
    event       text        NOT NULL,
    version     integer     NOT NULL,
    error       text        NOT NULL,
    since       timestamptz NOT NULL DEFAULT clock_timestamp(),
    -- The time at which the instance last met such a message.
    seen_at     timestamptz NOT NULL DEFAULT clock_timestamp(),
    PRIMARY KEY (instance_id, group_id, topic_id, event, version)
);
