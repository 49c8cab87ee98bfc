"""Applies a repair plan of the reconciliation. Each step is verified again and audited. A step may be repeated."""
