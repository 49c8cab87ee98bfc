-- Change 11: what is asked often is counted in the background.
--
-- Counting lag reads the position of every group on every queue, and dead or undecided messages by the row. The leading
-- broker process does so every few seconds and leaves the result here, one row each time, so that a status, a metric
-- or a page reads one row at any size. Append-only and trimmed: an updated row would pile up dead versions behind a
-- transaction that is held open elsewhere.

CREATE TABLE summary (
    summary_id   bigint           GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    at           timestamptz      NOT NULL DEFAULT clock_timestamp(),
    took_seconds double precision NOT NULL,
    facts        jsonb            NOT NULL,
    -- Per group what grows, for rates: small, because a few minutes of it are read at once.
    totals       jsonb            NOT NULL
);

-- Audits of conservation: every message is counted, so they run rarely and their result is kept.
CREATE TABLE audit (
    audit_id     bigint           GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    at           timestamptz      NOT NULL DEFAULT clock_timestamp(),
    took_seconds double precision NOT NULL,
    -- The equations that do not hold, in words; empty when all do.
    differences  text[]           NOT NULL,
    facts        jsonb            NOT NULL
);
