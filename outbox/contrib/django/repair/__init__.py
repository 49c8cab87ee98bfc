"""Applies a repair plan of the reconciliation. Every step is verified again and audited, and may be repeated."""
