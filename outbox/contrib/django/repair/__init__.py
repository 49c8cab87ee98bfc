"""Applies a repair plan of the reconciliation.

Each step is verified again and audited. Running a step twice has the same effect as running it once.
"""
