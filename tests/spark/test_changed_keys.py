"""A row whose key was changed after its message was sent: one finding, which nothing repairs on its own."""

from __future__ import annotations

import pytest

from tests.spark.conftest import Reconciler
from tests.spark.test_plan import actions
from tests.spark.world import Order, World

pytestmark = pytest.mark.timeout(300)


@pytest.mark.slow
def test_a_changed_key_is_one_finding_that_is_not_repaired(reconcile: Reconciler, world: World) -> None:
    world.add(*(Order(number=number) for number in (1, 2, 3)))
    # Order 3 is lost, order 2 has another key now: its message would be sent twice.
    world.app.execute("UPDATE orders_order SET id = 92002 WHERE id = 2")
    world.broker.execute("DELETE FROM commit_log WHERE key = '3'")
    reconcile.rules(groups=())
    first = reconcile.run()
    assert set(reconcile.findings(first)) == {("2", "", "ORPHAN"), ("3", "", "LOST")}
    [pair] = [row for row in reconcile.rows(first) if row["key"] == "2"]
    assert "row with key 92002 has the same values and no message" in pair["detail"]
    assert actions(reconcile) == {"2": "report", "3": "publish"}
    assert {name: count for name, count in first["totals"].items() if count} == {"ORPHAN": 1, "LOST": 1, "OK": 1}
    # Both keys stay open. If the message goes, the row is lost like any other.
    world.broker.execute("DELETE FROM commit_log WHERE key = '2'")
    second = reconcile.run()
    assert set(reconcile.findings(second)) == {("2", "", "RECOVERED"), ("3", "", "LOST"), ("92002", "", "LOST")}
    assert second["new_faults"] == 1
