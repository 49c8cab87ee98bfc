-- Change 29: the erasures that were done in these tables (docs/decisions/240).
--
-- A database that unreleased code installed may have this already.

CREATE TABLE IF NOT EXISTS erased (
    kind        text        NOT NULL CHECK (kind IN ('message', 'key', 'subject')),
    topic       text        NOT NULL,
    value       text        NOT NULL,
    replacement text,
    reason      text        NOT NULL,
    erased_at   timestamptz NOT NULL,
    PRIMARY KEY (kind, topic, value)
);

CREATE OR REPLACE VIEW erased_v1 AS
SELECT kind, topic, value, replacement, erased_at FROM erased;
