"""The ceiling: a bare table, one notification per transaction, claimed by deleting. Nothing retries or is kept."""
