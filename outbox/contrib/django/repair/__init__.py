"""Applies a repair plan of the reconciliation: verified again, limited in number and rate, audited, repeatable."""
