-- Change 27: the history of the diagrams (docs/decisions/231), and requests to drain or stop a process
-- (docs/decisions/232).
--
-- A database that unreleased code installed may have them already.
-- Locks: consumer_process

CREATE TABLE IF NOT EXISTS summary_past (
    resolution integer     NOT NULL,
    at         timestamptz NOT NULL,
    totals     jsonb       NOT NULL,
    groups     jsonb       NOT NULL,
    PRIMARY KEY (resolution, at)
);

ALTER TABLE consumer_process ADD COLUMN IF NOT EXISTS asked text CHECK (asked IN ('drain', 'stop')),
    ADD COLUMN IF NOT EXISTS asked_at timestamptz, ADD COLUMN IF NOT EXISTS draining boolean NOT NULL DEFAULT false;
