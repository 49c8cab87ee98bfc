-- Change 24: which rows of `scheduled` wait for the end of a claim (docs/decisions/214).
-- Locks: scheduled
--
-- A database that unreleased code installed may have this already.

ALTER TABLE scheduled ADD COLUMN IF NOT EXISTS claimed boolean NOT NULL DEFAULT false;
