"""UNDELIVERED needs a message that the subscription (filter, start) and the rule's own conditions accept."""

from __future__ import annotations

from datetime import timedelta

import pytest

from spark.common.errors import UsageProblem
from tests.spark.conftest import Reconciler
from tests.spark.world import RULES, START, Order, World, group_rules


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_group_owes_what_its_subscription_lets_pass(reconcile: Reconciler, world: World) -> None:
    """logistics starts at the third entry of its queue, points filters by a tag, cart has owed_when; no group has any
    effect. The first message entered the queue third, as if it had been delayed."""
    groups = group_rules().replace(
        'name = "cart"\n', "name = \"cart\"\nowed_when = \"headers::jsonb ->> 'kind' = 'cart'\"\n"
    )
    other = "message_when = \"coalesce(headers::jsonb ->> 'origin', '') <> 'import'\""
    reconcile.rules(text=RULES.format(extra=other, groups=groups))
    orders = [Order(number=number, at=START + timedelta(minutes=number)) for number in range(1, 6)]
    for order in orders:
        world.pay(order)
        world.send(order)
    imported = Order(number=5000)
    world.send(imported)
    world.broker.execute("""UPDATE commit_log SET headers = '{"origin": "import"}' WHERE key = '5000'""")
    world.broker.execute("UPDATE commit_log SET tag = 'vip' WHERE key = '2'")
    world.broker.execute("""UPDATE commit_log SET headers = '{"kind": "cart"}' WHERE key = '5'""")
    world.broker.execute("UPDATE subscription SET filter = 'vip || gold' WHERE group_id = %s", [world.groups["points"]])
    world.consume_all()
    moved = "UPDATE consume_queue e SET queue_offset = %s FROM commit_log l WHERE l.log_id = e.log_id AND key = %s"
    for offset, key in ((100, "3"), (2, "1"), (0, "3")):
        world.broker.execute(moved, [offset, key])
    world.broker.execute("UPDATE consumer_offset SET start_offset = 2 WHERE group_id = %s", [world.groups["logistics"]])
    result = reconcile.run()
    assert set(reconcile.findings(result)) == {
        *((str(number), "logistics", "UNDELIVERED") for number in (1, 4, 5)),
        ("2", "points", "UNDELIVERED"),
        ("5", "cart", "UNDELIVERED"),
    }
    note = "group points owes an effect for each message that its subscription selects ('vip || gold')"
    assert note in result["rules"][0]["notes"]

    world.broker.execute(
        "UPDATE subscription SET filter = 'sql: region = ''eu''' WHERE group_id = %s", [world.groups["points"]]
    )
    with pytest.raises(UsageProblem, match=r"group 'points' subscribes with the filter .*: write owed_when"):
        reconcile.run()
