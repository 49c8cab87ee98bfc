-- Change 25: a bucket stores the rate with which its next token was computed (docs/decisions/209).
-- Locks: bucket

ALTER TABLE bucket ADD COLUMN IF NOT EXISTS interval_seconds double precision;
