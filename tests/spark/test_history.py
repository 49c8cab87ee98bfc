"""The history of findings over runs: as Parquet that people query, and in the report."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow.dataset as pads
import pytest

from spark.common.store import Store
from spark.output import history
from tests.spark.conftest import Reconciler
from tests.spark.world import GROUPS, Order, World

pytestmark = pytest.mark.timeout(900)


def rows(output: Path, table: str) -> list[dict[str, Any]]:
    """A table as data tools read it: a folder of Parquet, by day."""
    folder = pads.dataset(output / "history" / table, format="parquet", partitioning="hive")
    found: list[dict[str, Any]] = folder.to_table().sort_by("finished_at").to_pylist()
    return found


@pytest.mark.soak
def test_a_finding_is_followed_from_run_to_run(reconcile: Reconciler, world: World) -> None:
    """Found once, changed, recovered: one row each for any number of runs; a clean run is counted too."""
    output = reconcile.folder / "out"
    reconcile.rules(groups=GROUPS)
    world.add(Order(number=1))
    reconcile.run()
    assert rows(output, "counts")[0]["class"] in ("OK", "PENDING") and not (output / "history" / "findings").exists()
    world.add(Order(number=2), Order(number=3))
    world.app.execute("UPDATE orders_order SET total = 99 WHERE id = 2")
    results = [reconcile.run(full=True)]
    world.app.execute("DELETE FROM orders_order WHERE id = 2")
    results.append(reconcile.run())
    world.pay(Order(number=2))
    results.append(reconcile.run())
    told = [(row["run"], row["event"], row["key"], row["class"], row["was"]) for row in rows(output, "findings")]
    assert told == [
        (results[0]["run"], "FOUND", "2", "MISMATCH", None),
        (results[1]["run"], "CHANGED", "2", "ORPHAN", "MISMATCH"),
        (results[2]["run"], "RECOVERED", "2", "RECOVERED", "ORPHAN"),
    ]
    counted = {row["run"]: row["count"] for row in rows(output, "counts") if row["class"] in ("MISMATCH", "ORPHAN")}
    assert counted == {result["run"]: 1 for result in results[:2]}
    orphan = json.loads(reconcile.rows(results[1])[0]["evidence"])
    (message,) = orphan["messages"]
    assert (message["state"], message["decided_by"]) == ("committed", "P")
    assert [(each["group"], each["effects"]) for each in orphan["effects"]] == [(name, 1) for name in GROUPS]
    assert {(each["group"], each["delivery"]) for each in orphan["deliveries"]} == {(name, "passed") for name in GROUPS}
    report = (output / "report.html").read_text()
    assert "Last runs" in report


@pytest.mark.slow
def test_a_run_that_was_killed_before_it_kept_its_history_is_made_up_for(reconcile: Reconciler, world: World) -> None:
    world.pay(Order(number=1))
    world.add(Order(number=2))
    reconcile.run()
    output = reconcile.folder / "out"
    whole = {table: rows(output, table) for table in ("counts", "findings")}
    for file in (output / "history").rglob("*.parquet"):
        file.unlink()
    store = Store(str(output))
    result = json.loads((output / "result.json").read_text())
    for _ in range(2):
        history.make_up(store, result)
        assert {table: rows(output, table) for table in ("counts", "findings")} == whole
