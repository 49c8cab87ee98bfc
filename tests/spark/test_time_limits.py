"""A message whose time limit was over: its group owes no effect (decision 207)."""

from __future__ import annotations

import pytest

from tests.spark.conftest import Reconciler
from tests.spark.world import Order, World


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_message_that_timed_out_owes_no_effect_and_others_still_do(reconcile: Reconciler, world: World) -> None:
    """Orders 1 and 2 have no effect in `points`, and order 1 timed out there; order 3 timed out after its effect."""
    reconcile.rules(groups=("logistics", "points"))
    world.add(Order(number=1), Order(number=2), Order(number=3))
    world.app.execute("DELETE FROM points_entry WHERE order_id IN (1, 2)")
    for number in (1, 1, 3):
        # A reset makes a group read the message again, so a message may have several rows.
        log_id = world._one("SELECT log_id FROM commit_log WHERE key = %s", str(number))
        world.broker.execute(
            "INSERT INTO timed_out (group_id, log_id, queue_id, queue_offset) VALUES (%s, %s, 1, 0)",
            [world.groups["points"], log_id],
        )
    result = reconcile.run()
    assert reconcile.findings(result) == [("2", "points", "UNDELIVERED")]
    assert not any("timed_out_v1" in note for note in result["rules"][0]["notes"])
    world.broker.execute("ALTER VIEW timed_out_v1 RENAME TO away")
    result = reconcile.run(full=True)
    assert reconcile.findings(result) == [("1", "points", "UNDELIVERED"), ("2", "points", "UNDELIVERED")]
    assert any("timed_out_v1 was not exported" in note for note in result["rules"][0]["notes"])
