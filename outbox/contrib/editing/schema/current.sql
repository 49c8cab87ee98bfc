-- The table of edited dead letters, as it is now (outbox/contrib/editing/letters.py).
-- Locks: dead_letter

-- The content that a message had before an edit. Who edited it, and why, is in the audit of operator actions.
CREATE TABLE edited_letter (
    edit_id      bigint      GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    group_id     integer     NOT NULL,
    log_id       bigint      NOT NULL,
    edited_at    timestamptz NOT NULL DEFAULT clock_timestamp(),
    content_type text        NOT NULL,
    headers      jsonb,
    body         bytea       NOT NULL,
    -- Retention and deletions remove the rows with their dead letter.
    FOREIGN KEY (group_id, log_id) REFERENCES dead_letter ON DELETE CASCADE
);
CREATE INDEX edited_letter_message ON edited_letter (log_id, group_id);
