"""A finding names the very message and transaction that it is about, also if other messages have its key."""

from __future__ import annotations

import uuid
from datetime import timedelta

import pytest

from tests.spark.conftest import Reconciler
from tests.spark.world import RULES, START, Order, World

pytestmark = pytest.mark.timeout(900)
SECOND = timedelta(seconds=1)
BY_ID = """
[[rule.group]]
name = "points"
table = "outbox_inbox"
message_id = "message_id"
time = "handled_at"
when = "consumer_group = 'points'"
within = "10m"

[[rule.group]]
name = "logistics"
within = "10m"
"""


@pytest.mark.slow
def test_a_stuck_half_and_a_dead_letter_are_named_beside_committed_messages_of_their_keys(
    reconcile: Reconciler, world: World
) -> None:
    """One committed message before each of them and one after: the finding is about neither."""
    stuck, dead, orders = uuid.uuid4(), uuid.uuid4(), (Order(number=1), Order(number=2), Order(number=3))
    world.add(Order(number=90, at=START + timedelta(hours=1)))
    for order in orders:
        world.pay(order)
        world.send(order)
    world.park(stuck, world.send(orders[0], decision=None, message_id=stuck), START)
    given_up = world.send(orders[1], message_id=dead, body=b"not JSON")
    world.kill_letter("points", given_up, START)
    for order in orders:
        world.send(order, message_id=uuid.uuid4(), stored_at=START + SECOND)
    first = world.send(orders[2], message_id=uuid.uuid4(), decision="R")
    reconcile.rules(groups=("points",), extra='messages = "at_least_one"')
    rows = {(row["key"], row["class"]): row for row in reconcile.rows(reconcile.run())}
    half, letter, damaged = rows["1", "HALF_STUCK"], rows["2", "DEAD"], rows["2", "UNREADABLE"]
    assert (half["transaction_id"], half["message_id"]) == (str(stuck), str(stuck))
    assert f"`python manage.py outbox_transaction decide {stuck} commit`" in half["remedy"]
    assert (letter["message_id"], letter["log_id"], letter["body"]) == (str(dead), given_up, "not JSON")
    assert f"`python manage.py outbox_dead_letter replay points {dead}`" in letter["remedy"]
    assert damaged["message_id"] == str(dead) and f"outbox_message show {dead}`" in damaged["remedy"]
    assert first not in {row["log_id"] for row in rows.values()}


@pytest.mark.slow
def test_a_duplicate_and_a_late_one_name_no_message_that_was_not_sent(reconcile: Reconciler, world: World) -> None:
    one, other, rolled_back = (uuid.uuid4() for _ in range(3))
    for number in (1, 2):
        world.pay(Order(number=number))
    world.send(Order(number=1), message_id=rolled_back, decision="R")
    world.send(Order(number=1), message_id=one)
    world.send(Order(number=1), message_id=other, stored_at=START + SECOND)
    late = START + timedelta(minutes=10)
    world.send(Order(number=2), decided_at=late)
    world.send(Order(number=2), message_id=uuid.uuid4(), stored_at=late + SECOND)
    world.add(Order(number=90, at=START + timedelta(hours=1)))
    reconcile.rules(groups=())
    rows = {row["key"]: row for row in reconcile.rows(reconcile.run())}
    assert rows["1"]["detail"] == f"messages: 2 (the oldest {one}, the newest {other}), rows: 1"
    assert set(rows["2"]["flags"]) == {"DUPLICATE", "LATE"}


@pytest.mark.soak
def test_dead_letters_of_messages_that_are_another_rules_are_not_this_rules(
    reconcile: Reconciler, world: World
) -> None:
    """A dead letter has no headers: whether message_when leaves it out is known by its message."""
    order, other = Order(number=1), uuid.uuid4()
    world.add(order, Order(number=90, at=START + timedelta(hours=1)))
    imported = world.send(order, message_id=other)
    world.broker.execute("""UPDATE commit_log SET headers = '{"origin": "import"}' WHERE log_id = %s""", [imported])
    world.kill_letter("points", imported, START)
    reconcile.rules(groups=("points",), extra="message_when = \"headers::jsonb ->> 'origin' IS NULL\"")
    assert reconcile.findings(reconcile.run()) == []


@pytest.mark.slow
def test_of_several_messages_the_unhandled_one_is_named(reconcile: Reconciler, world: World) -> None:
    """at_least_one, where effects name their messages, and by the broker's own offsets."""
    older, newer = uuid.uuid4(), uuid.uuid4()
    order = Order(number=1)
    world.pay(order)
    world.send(order, message_id=older)
    world.consume_all()
    world.send(order, message_id=newer, stored_at=START + SECOND)
    world.app.execute("INSERT INTO outbox_inbox VALUES ('points', 1, %s, %s)", [older, START + SECOND])
    done = Order(number=90, at=START + timedelta(hours=1))
    world.pay(done)
    world.app.execute("INSERT INTO outbox_inbox VALUES ('points', 1, %s, %s)", [done.message_id, done.at + SECOND])
    world.send(done)
    reconcile.rules(text=RULES.format(extra='messages = "at_least_one"', groups=BY_ID))
    rows = {(row["key"], row["group"]): row for row in reconcile.rows(reconcile.run()) if row["key"] == "1"}
    assert {(group, row["class"]) for (_, group), row in rows.items()} == {
        ("points", "UNDELIVERED"),
        ("logistics", "UNDELIVERED"),
    }
    assert {row["message_id"] for row in rows.values()} == {str(newer)}
    assert rows["1", "logistics"]["delivery"] == "waiting"
