-- Change 18: a restore on the running server also begins a new life; results of comparing ledgers and inboxes.
-- Locks: life, resync

ALTER TABLE life
    ADD COLUMN mark         xid,
    ADD COLUMN database_oid oid,
    ADD COLUMN table_oid    oid,
    ADD COLUMN is_copy      boolean NOT NULL DEFAULT false,
    ADD COLUMN stored_until timestamptz;

ALTER TABLE resync ADD COLUMN life_ordinal bigint NOT NULL DEFAULT 0;

CREATE TABLE comparison (
    kind        text        NOT NULL CHECK (kind IN ('ledger', 'decision', 'inbox')),
    subject     text        NOT NULL,
    topic       text        NOT NULL DEFAULT '',
    alias       text        NOT NULL,
    life_id     uuid        NOT NULL,
    compared_at timestamptz NOT NULL DEFAULT now(),
    state       jsonb       NOT NULL DEFAULT '{}',
    missing     bigint      NOT NULL DEFAULT 0,
    first_at    timestamptz,
    last_at     timestamptz,
    ids         uuid[]      NOT NULL DEFAULT '{}',
    unproven_from timestamptz,
    unproven_to   timestamptz,
    PRIMARY KEY (kind, subject, topic, alias)
);

CREATE TABLE missing_transaction (
    transaction_id uuid        NOT NULL,
    kind           text        NOT NULL CHECK (kind IN ('ledger', 'decision')),
    producer_group text        NOT NULL,
    alias          text        NOT NULL,
    at             timestamptz NOT NULL,
    found_at       timestamptz NOT NULL DEFAULT now(),
    settled_at     timestamptz,
    PRIMARY KEY (transaction_id, kind)
);
CREATE INDEX missing_transaction_open ON missing_transaction (kind, producer_group, alias, transaction_id)
WHERE settled_at IS NULL;
