-- The tables of limits, as they are now (outbox/contrib/limits/slots.py, docs/decisions/209).

-- The limits that the code declares, and the fields that an operator has changed.
CREATE TABLE subscription_limit (
    group_id   integer     NOT NULL,
    topic_id   integer     NOT NULL,
    declared   jsonb       NOT NULL,
    -- Null: the declared limits hold.
    override   jsonb,
    changed_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    PRIMARY KEY (group_id, topic_id)
);

-- The right of one instance to run one handler call, until the row expires. The primary key makes the limits exact: each
-- number has one holder. Unlogged: after a crash of the server, consumers drop their slots.
CREATE UNLOGGED TABLE slot (
    group_id    integer     NOT NULL,
    topic_id    integer     NOT NULL,
    -- '' for the limit `running`, else the key of the limit `per_key`.
    key         text        NOT NULL,
    -- From 1 to the limit.
    number      integer     NOT NULL,
    instance_id uuid        NOT NULL,
    expires_at  timestamptz NOT NULL,
    PRIMARY KEY (group_id, topic_id, key, number)
);
CREATE INDEX slot_instance ON slot (instance_id);

-- How many slots each instance wants, from which the instances compute their fair shares.
CREATE UNLOGGED TABLE slot_demand (
    group_id      integer     NOT NULL,
    topic_id      integer     NOT NULL,
    instance_id   uuid        NOT NULL,
    wanted        integer     NOT NULL,
    -- Handler calls that run now.
    in_use        integer     NOT NULL,
    -- Messages in memory that wait for a limit, and for which one.
    waiting       integer     NOT NULL,
    waiting_for   text        NOT NULL,
    waiting_since timestamptz,
    -- Keys whose slots another instance holds while this one waits for them.
    keys          text[]      NOT NULL,
    expires_at    timestamptz NOT NULL,
    PRIMARY KEY (group_id, topic_id, instance_id)
);

-- The token bucket of a limit `rate`, stored as one time: the next token is due at `next_at`.
CREATE UNLOGGED TABLE bucket (
    group_id integer     NOT NULL,
    topic_id integer     NOT NULL,
    next_at  timestamptz NOT NULL,
    -- The tokens that were taken last: the time of the first one, and their number.
    first_at timestamptz,
    granted  integer     NOT NULL DEFAULT 0,
    -- The time between two tokens with which `next_at` was computed.
    interval_seconds double precision,
    PRIMARY KEY (group_id, topic_id)
);
