"""An Airflow DAG (3): each day's rows are judged once their interval is over, and findings fail the run.

`outbox-reconcile` is called as a command, so that Spark and Airflow need not share an environment. What it says by its
exit code becomes what Airflow does: 0 and 1 are results, 2 fails at once, 3 is tried again.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
from datetime import UTC, datetime, timedelta
from typing import Any

from airflow.sdk import CronDataIntervalTimetable, dag, task
from airflow.sdk.exceptions import AirflowException, AirflowFailException

RULES = os.environ.get("RECONCILE_RULES", "/etc/outbox/reconcile.toml")
OUTPUT = os.environ.get("RECONCILE_OUTPUT", "/var/lib/reconcile")
MORE = shlex.split(os.environ.get("RECONCILE_OPTIONS", ""))
# What is small enough for XCom; the findings themselves are in the output.
PASSED_ON = ("run", "status", "interval", "totals", "faults", "acknowledged", "report")


# Intervals are named, because Airflow 3 gives a plain "@daily" one without length.
@dag(
    schedule=CronDataIntervalTimetable("@daily", timezone="UTC"),
    start_date=datetime(2025, 6, 1, tzinfo=UTC),
    catchup=False,
    max_active_runs=1,
)
def outbox_reconcile() -> None:
    """Reconcile a day, then look at what came of it."""

    # An interval is not over before the longest limit of the rules has passed (exit code 3).
    @task(retries=6, retry_delay=timedelta(minutes=10))
    def reconcile(
        data_interval_start: datetime | None = None, data_interval_end: datetime | None = None
    ) -> dict[str, Any]:
        assert data_interval_start is not None
        assert data_interval_end is not None
        interval = ["--from", data_interval_start.isoformat(), "--to", data_interval_end.isoformat()]
        output = f"{OUTPUT}/{data_interval_start:%Y-%m-%d}"
        command = ["outbox-reconcile", "run", "--rules", RULES, "--output", output, *interval, "--json", *MORE]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
        if done.returncode == 2:
            raise AirflowFailException("something must be corrected first, see the log")
        if done.returncode not in (0, 1):
            raise AirflowException(f"incomplete (exit code {done.returncode}), see the log")
        result = json.loads(done.stdout)
        return {**{name: result[name] for name in PASSED_ON}, "output": output}

    @task
    def judge(result: dict[str, Any]) -> None:
        if result["faults"]:
            found = {name: count for name, count in result["totals"].items() if count}
            raise AirflowFailException(f"{result['faults']} findings ({found}): {result['output']}/{result['report']}")

    judge(reconcile())


reconciliation = outbox_reconcile()
