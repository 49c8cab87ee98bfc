-- Change 31: the versions of events whose messages wait for newer code (docs/decisions/251).
--
-- A database that unreleased code installed may have it already.

CREATE TABLE IF NOT EXISTS unknown_version (
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
