-- Change 2: code of version N-1 works on the tables of version N.
--
-- Each row's `version` is what code must know to work with these tables; released code refuses tables whose greatest
-- `version` it does not know. Only a change that breaks the code before it inserts a row with a greater one. `change`
-- is the last file that was applied: code needs the changes it comes with, and accepts further ones.
-- A column instead of a table of its own: roles that may read schema_version today may read it tomorrow.

ALTER TABLE schema_version ADD COLUMN change integer NOT NULL DEFAULT 1;
