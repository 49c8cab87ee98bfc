-- Change 15: lives of the server, so that a tick need not wait for the disk.
-- Locks: op_log

CREATE TABLE life (
    life_id   uuid        PRIMARY KEY,
    ordinal   bigint      GENERATED ALWAYS AS IDENTITY UNIQUE,
    began_at  timestamptz NOT NULL DEFAULT clock_timestamp(),
    server    text        NOT NULL,
    queue_ids integer[]   NOT NULL,
    heads     bigint[]    NOT NULL
);

CREATE UNLOGGED TABLE life_sign (
    life_id uuid NOT NULL,
    server  text NOT NULL
);

-- In two steps, so that decisions from before this change keep null.
ALTER TABLE op_log ADD COLUMN relaxed boolean;
ALTER TABLE op_log ALTER COLUMN relaxed SET DEFAULT current_setting('synchronous_commit') NOT IN ('on', 'remote_apply');
