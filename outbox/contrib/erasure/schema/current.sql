-- The table of erasures, as it is now (docs/decisions/240).

-- Each row is an erasure that was done in these tables. A restore of a backup brings erased content back, and takes rows
-- of this table away. So a worker compares the table with the list of erasures, and repeats what is missing.
CREATE TABLE erased (
    -- 'message': `value` is the id of a message. 'key': `value` is the keyed hash of the topic's key. 'subject': `value`
    -- is the id of a subject's encryption key.
    kind        text        NOT NULL CHECK (kind IN ('message', 'key', 'subject')),
    topic       text        NOT NULL,
    value       text        NOT NULL,
    -- The text that has replaced the key of the messages; null if the key has stayed.
    replacement text,
    reason      text        NOT NULL,
    erased_at   timestamptz NOT NULL,
    PRIMARY KEY (kind, topic, value)
);

-- For `outbox-reconcile archive --erase`.
CREATE VIEW erased_v1 AS
SELECT kind, topic, value, replacement, erased_at FROM erased;
