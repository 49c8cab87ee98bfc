"""Reconciliation on Spark: compares business tables, messages and effects with each other.

    result = outbox_spark.run(spark, "reconcile.toml")
    result.findings.show()

In a checkout this package is called `spark`. The wheel installs it as `outbox_spark`. The package reads the broker only
through the broker's published views (`sources/contract.py`) and imports nothing of the framework.
"""

from .api import Result, run
from .common.errors import ReconcileError

__all__ = ["ReconcileError", "Result", "run"]
