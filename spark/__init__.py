"""Reconciliation on Spark: compares business tables, messages and effects with each other.

In a checkout this package is `spark`; the wheel installs it as `outbox_spark`. It knows the broker only by its
published views (`sources/contract.py`) and imports nothing of the framework.
"""
