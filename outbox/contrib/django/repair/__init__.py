"""Applying a repair plan of the reconciliation: verified again, capped, paced, written down, repeatable."""
