-- Change 23: limits of subscriptions for all workers together (docs/decisions/209).
--
-- A database that unreleased code installed may have these already.

CREATE TABLE IF NOT EXISTS subscription_limit (
    group_id   integer     NOT NULL,
    topic_id   integer     NOT NULL,
    declared   jsonb       NOT NULL,
    override   jsonb,
    changed_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    PRIMARY KEY (group_id, topic_id)
);

CREATE UNLOGGED TABLE IF NOT EXISTS slot (
    group_id    integer     NOT NULL,
    topic_id    integer     NOT NULL,
    key         text        NOT NULL,
    number      integer     NOT NULL,
    instance_id uuid        NOT NULL,
    expires_at  timestamptz NOT NULL,
    PRIMARY KEY (group_id, topic_id, key, number)
);
CREATE INDEX IF NOT EXISTS slot_instance ON slot (instance_id);

CREATE UNLOGGED TABLE IF NOT EXISTS slot_demand (
    group_id      integer     NOT NULL,
    topic_id      integer     NOT NULL,
    instance_id   uuid        NOT NULL,
    wanted        integer     NOT NULL,
    in_use        integer     NOT NULL,
    waiting       integer     NOT NULL,
    waiting_for   text        NOT NULL,
    waiting_since timestamptz,
    keys          text[]      NOT NULL,
    expires_at    timestamptz NOT NULL,
    PRIMARY KEY (group_id, topic_id, instance_id)
);

CREATE UNLOGGED TABLE IF NOT EXISTS bucket (
    group_id integer     NOT NULL,
    topic_id integer     NOT NULL,
    next_at  timestamptz NOT NULL,
    first_at timestamptz,
    granted  integer     NOT NULL DEFAULT 0,
    PRIMARY KEY (group_id, topic_id)
);
