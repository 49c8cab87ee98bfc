-- Change 32: topics whose messages are searched by key through an index (docs/decisions/254).
-- Locks: topic
--
-- A database that unreleased code installed may have it already.

ALTER TABLE topic ADD COLUMN IF NOT EXISTS searchable boolean NOT NULL DEFAULT false;
