-- Change 5: parked transactions are asked again, and a retry can be recalled.
-- Locks: subscription, pending_check

ALTER TABLE pending_check
    ADD COLUMN park_reason text,
    ADD COLUMN asked_at timestamptz;
CREATE INDEX pending_check_ask_parked ON pending_check (producer_group, due_at) WHERE parked_at IS NOT NULL;

CREATE TABLE producer_group (
    name    text        PRIMARY KEY,
    seen_at timestamptz NOT NULL
);

CREATE TABLE recalled_retry (
    group_id    integer     NOT NULL,
    log_id      bigint      NOT NULL,
    attempt     smallint    NOT NULL,
    recalled_at timestamptz NOT NULL DEFAULT now()
);
CREATE INDEX recalled_retry_message ON recalled_retry (log_id);
ALTER TABLE subscription ADD COLUMN recalled bigint NOT NULL DEFAULT 0;
