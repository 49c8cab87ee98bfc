"""While others write: no false finding, and every real one."""

from __future__ import annotations

import time

import pytest

from tests.spark.conftest import Reconciler
from tests.spark.world import World
from tests.spark.writers import writing

pytestmark = pytest.mark.timeout(600)


def live_rules(reconcile: Reconciler) -> None:
    """Without a grace period, so that the protocol alone has to be right; unsent messages are not overdue yet."""
    path = reconcile.rules(groups=("logistics",))
    text = path.read_text().replace('grace = "30s"', 'grace = "0s"')
    text = text.replace('stuck_after = "15m"', 'stuck_after = "2h"')
    path.write_text(text.replace('within = "10m"', 'within = "2h"'))


def reconcile_while_writing(reconcile: Reconciler, world: World, seconds: float) -> None:
    live_rules(reconcile)
    world.add_many(20)
    with writing(world) as writers:
        ends = time.monotonic() + seconds
        while True:
            assert reconcile.findings(reconcile.run()) == []
            writers.kill_one()
            if time.monotonic() >= ends:
                break
        world.app.execute("DELETE FROM orders_order WHERE id = 5")
        world.broker.execute("DELETE FROM commit_log WHERE key = '6'")
        result = reconcile.run(full=True)
        planted = [("6", "", "LOST"), ("5", "", "ORPHAN")]
        assert reconcile.findings(result) == planted, "faults among the writes are seen, and nothing else"
    # Transactions that the last kill cut off are undecided; no process writes any more, so everything is counted once.
    last = reconcile.run(full=True)
    assert reconcile.findings(last) == planted
    assert last["rules"][0]["counts"] == {
        **dict.fromkeys(last["totals"], 0),
        **conserved(world),
        "LOST": 1,
        "ORPHAN": 1,
    }


def conserved(world: World) -> dict[str, int]:
    """How many keys must be OK and PENDING, counted in the databases themselves."""
    orders = {str(row[0]) for row in world.app.execute("SELECT id FROM orders_order")}
    states: dict[str, set[str]] = {"committed": set(), "undecided": set(), "rolled_back": set()}
    for key, state in world.broker.execute("SELECT key, state FROM message_v1"):
        states[state].add(key)
    assert len(orders & states["committed"]) > 50
    assert states["undecided"], "some ends were never sent"
    assert orders & states["rolled_back"] == set()
    assert orders - states["committed"] - states["undecided"] == {"6"}
    return {"OK": len(orders & states["committed"]), "PENDING": len(states["undecided"])}


@pytest.mark.soak
def test_writer_load_with_no_planted_fault_has_zero_findings(reconcile: Reconciler, world: World) -> None:
    """Random commits, rollbacks, lost ends and kill -9 of writers: the quick form."""
    reconcile_while_writing(reconcile, world, 0)


@pytest.mark.soak
@pytest.mark.timeout(1500)
def test_ten_minutes_of_writer_load_have_zero_findings(reconcile: Reconciler, world: World) -> None:
    reconcile_while_writing(reconcile, world, 600)
