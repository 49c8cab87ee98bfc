"""Rules that name an event: types from the code, old versions by `@upcast`, and the errors of the rules file."""

from __future__ import annotations

import json
import re
import sys
import uuid
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest

from outbox.events import declaration
from spark.common.errors import RulesInvalid
from spark.rules import file as rules_file
from spark.rules.rule import FieldType
from tests.documents import DOCS, blocks
from tests.spark.conftest import Reconciler
from tests.spark.world import START, Order, World

MODULE = "shop_events_of_these_tests"
CODE = """
from dataclasses import dataclass
from datetime import datetime
from decimal import Decimal

from outbox.events import event, upcast

EURO = "EUR"


@dataclass(frozen=True)
class Buyer:
    name: str
    vip: bool = False


@event("order.paid", version=3, key="order_id")
@dataclass(frozen=True)
class OrderPaid:
    order_id: int
    buyer: Buyer
    amount: Decimal
    paid_at: datetime
    currency: str = EURO


@upcast("order.paid", 1)
def with_amount(body):
    body = dict(body)
    return {**body, "amount": body.pop("total"), "currency": EURO}


@upcast("order.paid", 2)
def with_buyer(body):
    paid_at = datetime.fromisoformat(body["paid_at"])
    return OrderPaid(body["order_id"], Buyer(body["customer"]), Decimal(body["amount"]), paid_at, body["currency"])
"""
OTHER = """

@event("order.lost", topic="order.paid")
@dataclass(frozen=True)
class OrderLost:
    reason: str
"""
RULES = """
version = 1

[database.app]
env = "RECONCILE_APP"

[database.broker]
env = "RECONCILE_BROKER"
schema = "outbox"

[broker]
database = "broker"
events = ["shop_events_of_these_tests"]

[[rule]]
name = "order-paid"
database = "app"
table = "orders_order"
key = "id"
when = "paid_at IS NOT NULL"
time = "paid_at"
event = "order.paid"
grace = "30s"
{extra}

[[rule.field]]
column = "total"
body = "amount"

[[rule.field]]
column = "customer"
body = "buyer.name"

[[rule.field]]
column = "paid_at"
"""


@pytest.fixture
def events(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The file of a module with events, which can be changed until a rules file names it."""
    path = tmp_path / f"{MODULE}.py"
    path.write_text(CODE)
    monkeypatch.syspath_prepend(tmp_path)
    with declaration.restored():
        declaration.forget()
        yield path
    sys.modules.pop(MODULE, None)


def headers(world: World, log_id: int, event: str, version: str) -> None:
    world.broker.execute(
        "UPDATE commit_log SET headers = jsonb_build_object('outbox-event', %s::text, 'outbox-event-version', %s::text)"
        " WHERE log_id = %s",
        [event, version, log_id],
    )


def send(world: World, order: Order, version: int, **values: str) -> None:
    """The order's row and its message in a version of the event; `values` replaces fields of the body."""
    world.pay(order)
    given = {
        1: {"order_id": order.number, "customer": order.customer, "total": str(order.total)},
        2: {"order_id": order.number, "customer": order.customer, "amount": str(order.total), "currency": "EUR"},
        3: {"order_id": order.number, "buyer": {"name": order.customer}, "amount": str(order.total)},
    }[min(version, 3)]
    body = {**given, "paid_at": order.at.isoformat(), **values}
    log_id = world.send(order, body=json.dumps(body).encode())
    if version != 1 or order.number % 2:
        headers(world, log_id, "order.paid", str(version))


@pytest.mark.slow
def test_mixed_versions_are_compared_by_the_functions_of_the_project(
    reconcile: Reconciler, world: World, events: Path
) -> None:
    events.write_text(CODE + OTHER)
    # Right ones of each version; 2 has no headers, as a message from before the type.
    for number, version in ((1, 1), (2, 1), (3, 2), (4, 3)):
        send(world, Order(number=number), version)
    # Wrong amounts in an old and in the present version.
    send(world, Order(number=5), 1, total="99.00")
    send(world, Order(number=6), 3, amount="99.00")
    # A function that fails, a version that this code does not know, a text that is no JSON, and another event.
    send(world, Order(number=7), 2, paid_at="soon")
    send(world, Order(number=8), 9)
    world.pay(Order(number=9))
    headers(world, world.send(Order(number=9), body=b"{'total': 1}"), "order.paid", "1")
    send(world, Order(number=10), 3)
    lost = world.send(Order(number=10), message_id=uuid.uuid4(), body=b'{"reason": "rain"}')
    headers(world, lost, "order.lost", "1")
    send(world, Order(number=90, at=START + timedelta(hours=1)), 3)
    reconcile.rules(text=RULES.format(extra=""))
    found = {row["key"]: (row["class"], row["detail"]) for row in reconcile.rows(reconcile.run())}
    assert {key: kind for key, (kind, _) in found.items()} == {
        "5": "MISMATCH",
        "6": "MISMATCH",
        "7": "UNREADABLE",
        "8": "UNREADABLE",
        "9": "UNREADABLE",
    }
    assert found["5"][1] == found["6"][1] == "row and body differ: total 12.5 in the row, 99 in the body"
    assert _without_id(found["7"][1]) == (
        "the body cannot be read as version 3 of order.paid: @upcast failed at order.paid version 2: ValueError: "
        "Invalid isoformat string: 'soon'"
    )
    assert _without_id(found["8"][1]) == (
        "the body cannot be read as version 3 of order.paid: no @upcast leads from order.paid version 9 to order.paid "
        "version 3. Declare it, or name the modules that do"
    )
    assert _without_id(found["9"][1]).startswith("the body is not JSON")


def _without_id(detail: str) -> str:
    """The detail of an UNREADABLE finding without its beginning, which names the message."""
    beginning, _, rest = detail.partition(": ")
    assert re.fullmatch(r"message [0-9a-f-]{36}", beginning), detail
    return rest


ENVIRONMENT = {"RECONCILE_APP": "postgresql:///app", "RECONCILE_BROKER": "postgresql:///broker"}


def test_topic_and_types_come_from_the_event(events: Path) -> None:
    [rule] = rules_file.parse(RULES.format(extra=""), environment=ENVIRONMENT).rules
    assert (rule.topic, rule.message_when) == ("order.paid", None)
    assert [(field.body, field.type) for field in rule.fields] == [
        ("amount", FieldType.DECIMAL),
        ("buyer.name", FieldType.TEXT),
        ("paid_at", FieldType.TIMESTAMP),
    ]
    assert rule.event is not None
    assert {start: len(chain) for start, chain in rule.event.upcasts.items()} == {
        ("order.paid", 1): 2,
        ("order.paid", 2): 1,
        ("order.paid", 3): 0,
    }


def test_the_example_of_the_documentation_is_valid(events: Path) -> None:
    example = blocks(DOCS / "reconciliation" / "rules.md", "toml")[1].replace("shop.events", MODULE)
    text = RULES[: RULES.index("[broker]")] + example
    [rule] = rules_file.parse(text, environment=ENVIRONMENT).rules
    assert (rule.topic, [field.type for field in rule.fields]) == ("order.paid", [FieldType.DECIMAL])


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        ('event = "order.paid"', 'event = "order.payed"', "declare no event 'order.payed'; use one of: order.paid."),
        ('body = "amount"', 'body = "amont"', "has no field 'amont' that can be compared; did you mean 'amount'?"),
        ('grace = "30s"', 'topic = "order.paid"', "topic: has no meaning with event"),
        ('grace = "30s"', 'bucket = "1h"', "cannot convert the bodies of old versions"),
        ("shop_events_of", "no_events_of", "the module 'no_events_of_these_tests' cannot be imported"),
        ("\nevents = [", "\n# events = [", "[broker] names no events"),
    ],
)
def test_errors_name_the_remedy(events: Path, before: str, after: str, said: str) -> None:
    text = RULES.format(extra="").replace(before, after)
    with pytest.raises(RulesInvalid) as raised:
        rules_file.parse(text, environment=ENVIRONMENT)
    assert said in str(raised.value)
