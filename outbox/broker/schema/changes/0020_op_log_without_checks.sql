-- Change 20: op_log has no CHECK, which took CPU of each publish (docs/decisions/200).
-- Locks: op_log

ALTER TABLE op_log DROP CONSTRAINT IF EXISTS op_log_decision_check,
    DROP CONSTRAINT IF EXISTS op_log_decided_by_check;
