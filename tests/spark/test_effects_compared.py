"""Effects are compared with their message, not only counted: their values, their sum, and their time."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from spark.common.errors import RulesInvalid
from spark.judging.remedies import REMEDIES
from spark.rules.file import parse
from spark.rules.rule import FAULTS
from tests.spark.conftest import Reconciler
from tests.spark.world import RULES, START, Order, World

HOUR = timedelta(hours=1)
GROUPS = """
[[rule.group]]
name = "points"
table = "charge"
key = "order_id"
time = "created_at"
within = "10m"
compare_effect = {amount = "total", buyer = "customer"}
[[rule.group]]
name = "cart"
table = "refund"
key = "order_id"
time = "created_at"
within = "10m"
sum_effect = {amount = "total"}
"""
TABLES = """
CREATE TABLE charge (order_id bigint, amount numeric, buyer text, created_at timestamptz);
CREATE TABLE refund (order_id bigint, amount numeric, created_at timestamptz);
"""
ENVIRONMENT = {"RECONCILE_APP": "dbname=a", "RECONCILE_BROKER": "dbname=b"}


class Effects:
    """Orders whose effects are a charge and two parts of a refund."""

    def __init__(self, world: World) -> None:
        self.world = world
        world.app.execute(TABLES)

    def add(
        self,
        number: int,
        *,
        at: datetime = START,
        charges: tuple[str | None, ...] = ("12.50",),
        parts: tuple[str, ...] = ("10", "2.50"),
        after: timedelta = timedelta(seconds=1),
        buyer: str | None = None,
    ) -> None:
        order = Order(number=number, at=at)
        self.world.pay(order)
        self.world.send(order)
        for amount in charges:
            values = [number, amount, buyer or order.customer, at + after]
            self.world.app.execute("INSERT INTO charge VALUES (%s, %s, %s, %s)", values)
        for amount in parts:
            self.world.app.execute(
                "INSERT INTO refund VALUES (%s, %s, %s)", [number, amount, at + timedelta(seconds=2)]
            )
        self.world.consume_all()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_wrong_value_a_wrong_sum_and_an_early_effect_are_kinds_of_their_own(
    reconcile: Reconciler, world: World
) -> None:
    effects, now = Effects(world), datetime.now(UTC)
    reconcile.rules(text=RULES.format(extra="", groups=GROUPS))
    effects.add(1)
    effects.add(2, charges=("12.51",))
    effects.add(3, parts=("10",))
    effects.add(4, parts=("10", "10"))
    effects.add(5, after=-HOUR)
    effects.add(6, charges=("12.50", "3"))
    effects.add(7, charges=(None,))
    effects.add(8, at=now - timedelta(minutes=5), parts=("10",))
    effects.add(9, at=now - timedelta(minutes=5), parts=("10", "10"))
    effects.add(10, buyer="another")
    effects.add(11, after=-timedelta(seconds=20))
    result = reconcile.run()
    found = {(row["key"], row["group"]): row for row in reconcile.rows(result)}
    assert {subject: row["class"] for subject, row in found.items()} == {
        ("2", "points"): "WRONG_EFFECT",
        ("3", "cart"): "WRONG_SUM",
        ("4", "cart"): "WRONG_SUM",
        ("5", "points"): "EARLY",
        ("6", "points"): "DUPLICATE",
        ("7", "points"): "WRONG_EFFECT",
        ("9", "cart"): "WRONG_SUM",
        ("10", "points"): "WRONG_EFFECT",
    }
    assert {subject: row["detail"] for subject, row in found.items()} == {
        ("2", "points"): "effect of points and message differ: amount 12.51 in the effect, 12.5 in the body",
        ("3", "cart"): "1 effects of cart do not add up to their message: amount 10 in the sum, 12.5 in the body",
        ("4", "cart"): "2 effects of cart do not add up to their message: amount 20 in the sum, 12.5 in the body",
        ("5", "points"): "the effect of points is 1:00:00 older than its row",
        ("6", "points"): "2 effects of one message by points",
        ("7", "points"): "effect of points and message differ: amount null in the effect, 12.5 in the body",
        ("9", "cart"): "2 effects of cart do not add up to their message: amount 20 in the sum, 12.5 in the body",
        ("10", "points"): "effect of points and message differ: buyer another in the effect, customer 3 in the body",
    }
    assert found["6", "points"]["flags"] == ["DUPLICATE", "WRONG_EFFECT"]
    assert found["2", "points"]["mismatched"] == found["3", "cart"]["mismatched"] == ["amount"]
    causes = {(cause["class"], cause["group"], cause["detail"]): cause["findings"] for cause in result["causes"]}
    assert causes == {
        ("WRONG_EFFECT", "points", "amount"): 2, ("WRONG_EFFECT", "points", "buyer"): 1,
        ("WRONG_SUM", "cart", "amount"): 3, ("EARLY", "points", ""): 1, ("DUPLICATE", "points", ""): 1,
    }  # fmt: skip
    waiting = next(rule["groups"]["cart"]["PENDING"] for rule in result["rules"])
    assert waiting == 1, "the second part of order 8 may still come"


def test_the_rules_name_columns_and_fields() -> None:
    (rule,) = parse(RULES.format(extra="", groups=GROUPS), environment=ENVIRONMENT).rules
    assert [group.compare_effect for group in rule.groups] == [(("amount", 0), ("buyer", 1)), ()]
    assert [group.sum_effect for group in rule.groups] == [(), (("amount", 0),)]
    assert (rule.near_places, rule.numbers) == ((), (0,))


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ('{amount = "total"}', '{amount = "price"}', "no [[rule.field]] compares the field 'price' of the body"),
        ('sum_effect = {amount = "total"}', 'sum_effect = {amount = "customer"}', "'customer' is no number"),
        ('sum_effect = {amount = "total"}', 'sum_effect = "total"', "must be a table"),
        ('buyer = "customer"', 'buyer = "total"', "the field 'total' is compared twice"),
        ('topic = "order.paid"', 'topic = "order.paid"\nmessages = "at_least_one"', "no single message to compare"),
    ],
)
def test_what_cannot_be_compared_is_an_error_of_the_rules(old: str, new: str, said: str) -> None:
    text = RULES.format(extra="", groups=GROUPS)
    with pytest.raises(RulesInvalid) as caught:
        parse(text.replace(old, new), environment=ENVIRONMENT)
    assert said in str(caught.value)


def test_each_class_has_a_remedy() -> None:
    assert set(FAULTS) <= set(REMEDIES)
    again = [known.settle for known in REMEDIES.values() if "redeliver" in known.settle]
    assert len(again) == 4
    assert all("messages that it publishes are published a second time" in settle for settle in again)
