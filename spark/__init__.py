"""Reconciliation on Spark: business tables, messages and effects, held against each other.

In a checkout this package is `spark`; the wheel installs it as `outbox_spark`. It knows the broker only by its
published views (`contract.py`) and imports nothing of the framework.
"""
