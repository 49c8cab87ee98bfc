-- Change 28: producer groups of roles (docs/decisions/235), limits of topics (docs/decisions/238).
-- Locks: topic
--
-- A database that unreleased code installed may have these already.

ALTER TABLE topic
    ADD COLUMN IF NOT EXISTS backlog_limit bigint,
    ADD COLUMN IF NOT EXISTS space_limit_bytes bigint,
    ADD COLUMN IF NOT EXISTS on_limit text NOT NULL DEFAULT 'refuse' CHECK (on_limit IN ('refuse', 'warn')),
    ADD COLUMN IF NOT EXISTS over_limit jsonb;

CREATE TABLE IF NOT EXISTS publisher (
    role           name NOT NULL,
    producer_group text NOT NULL,
    PRIMARY KEY (producer_group, role)
);
