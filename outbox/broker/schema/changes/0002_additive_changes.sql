-- Change 2: the number of the last change; version 0.1 ignores the column.
-- Locks: schema_version

ALTER TABLE schema_version ADD COLUMN change integer NOT NULL DEFAULT 1;
