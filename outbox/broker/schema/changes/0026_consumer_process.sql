-- Change 26: what each consumer process last wrote about itself (docs/decisions/220).
--
-- A database that unreleased code installed may have it already.

CREATE UNLOGGED TABLE IF NOT EXISTS consumer_process (
    instance_id uuid        PRIMARY KEY,
    version     text        NOT NULL,
    seen_at     timestamptz NOT NULL,
    calls       integer     NOT NULL,
    longest     jsonb       NOT NULL
);
