"""Reconciliation on Spark: compares business tables, messages and effects with each other.

In a checkout this package is called `spark`. The wheel installs it as `outbox_spark`. The package reads the broker only
through the broker's published views (`sources/contract.py`) and imports nothing of the framework.
"""
