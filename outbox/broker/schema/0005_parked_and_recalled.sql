-- Change 5: parked transactions are asked again, and a retry can be recalled.

ALTER TABLE pending_check
    -- Why it was parked (outbox.transaction.ParkReason); null when version 0.1 parked it.
    ADD COLUMN park_reason text,
    -- When it was last handed to a producer of its group.
    ADD COLUMN asked_at timestamptz;
CREATE INDEX pending_check_ask_parked ON pending_check (producer_group, due_at) WHERE parked_at IS NOT NULL;

-- When each producer group last asked for its checks, to within some seconds: whether anybody runs it.
CREATE TABLE producer_group (
    name    text        PRIMARY KEY,
    seen_at timestamptz NOT NULL
);

-- Retries that were taken back: the group does not get the message again. Rows go with their messages.
CREATE TABLE recalled_retry (
    group_id    integer     NOT NULL,
    log_id      bigint      NOT NULL,
    attempt     smallint    NOT NULL,
    recalled_at timestamptz NOT NULL DEFAULT now()
);
CREATE INDEX recalled_retry_message ON recalled_retry (log_id);
-- How many there were of the group on the topic: a term of the group's conservation.
ALTER TABLE subscription ADD COLUMN recalled bigint NOT NULL DEFAULT 0;
