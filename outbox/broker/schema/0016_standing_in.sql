-- Change 16: a consumer's process can sequence what it consumes, and the broker's own process stands in for it.
--
-- Whoever stands in gives way: the lease of a role is taken from it although it has not run out (docs/decisions/163).
ALTER TABLE leader_lease ADD COLUMN stands_in boolean NOT NULL DEFAULT false;
