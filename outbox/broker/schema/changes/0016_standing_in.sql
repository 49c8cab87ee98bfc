-- Change 16: a leader may stand in for the process that should lead.
-- Locks: leader_lease

ALTER TABLE leader_lease ADD COLUMN stands_in boolean NOT NULL DEFAULT false;
