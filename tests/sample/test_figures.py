"""The demo's figures must show what went wrong: each kind of fault is planted and has to be counted."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest
from psycopg import sql

from outbox.broker import embedded
from sample_project.demo import charges, figures, verdicts
from sample_project.demo.charges import PaymentKill
from sample_project.provider import Charge
from tests.sample.conftest import ROOT

PREFIX = f"figures_{os.getpid()}"
# In one process, because to start one takes as long as to migrate.
MIGRATE = """
import sys
from sample_project.manage import main
for more in ([], ["--database=broker"]):
    sys.argv = ["manage.py", "migrate", "--no-input", *more]
    main()
"""
Connection = psycopg.Connection[tuple[object, ...]]


@pytest.fixture(scope="module")
def databases(server_url: str) -> Iterator[tuple[str, str]]:
    """The sample's two databases, migrated and without orders."""
    environment = {
        **os.environ,
        "OUTBOX_POSTGRES_URL": server_url,
        "SAMPLE_DATABASE_PREFIX": PREFIX,
        "SAMPLE_PATH": "two-phase",
    }
    done = subprocess.run([sys.executable, "-c", MIGRATE], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    yield (
        embedded.database_url(server_url, f"{PREFIX}_orders"),
        embedded.database_url(server_url, f"{PREFIX}_broker"),
    )
    with psycopg.connect(server_url, autocommit=True) as connection:
        for name in ("orders", "broker", "celery"):
            database = sql.Identifier(f"{PREFIX}_{name}")
            connection.execute(sql.SQL("DROP DATABASE IF EXISTS {} WITH (FORCE)").format(database))


@pytest.fixture
def orders(databases: tuple[str, str]) -> Iterator[Connection]:
    """The orders database with orders 1 and 2 paid and carried through, and 3 not paid; undone afterwards."""
    with psycopg.connect(databases[0]) as connection:
        connection.execute(
            "INSERT INTO orders_order (id, customer, total, status, created_at, paid_at) VALUES"
            " (1, 'a', 10, 'shipped', now(), now()), (2, 'b', 20, 'shipped', now(), now()),"
            " (3, 'c', 30, 'new', now(), null)"
        )
        connection.execute("INSERT INTO logistics_shipment (order_id, created_at) VALUES (1, now()), (2, now())")
        connection.execute(
            "INSERT INTO points_entry (order_id, customer, points, created_at) VALUES"
            " (1, 'a', 10, now()), (2, 'b', 20, now())"
        )
        connection.execute(
            "INSERT INTO cart_clearance (order_id, customer, created_at) VALUES (1, 'a', now()), (2, 'b', now())"
        )
        connection.execute(
            "INSERT INTO payments_charge (order_id, number, amount, created_at) VALUES"
            " (1, 'ch_1', 10, now()), (2, 'ch_2', 20, now())"
        )
        connection.execute(
            "INSERT INTO income_shownminute (minute, income, orders, revision)"
            " VALUES (date_trunc('minute', now()), 30, 2, 2)"
        )
        yield connection
        connection.rollback()


@pytest.fixture
def broker(databases: tuple[str, str]) -> Iterator[Connection]:
    """The broker's database with the messages of orders 1 and 2; undone afterwards."""
    with psycopg.connect(databases[1]) as connection:
        for key in ("1", "2"):
            connection.execute(_MESSAGE, [key])
        yield connection
        connection.rollback()


# A committed message about an order.
_MESSAGE = """
WITH m AS (
    INSERT INTO outbox.commit_log
        (born_at, transaction_id, message_id, topic_id, half, key, tag, content_type, body)
    SELECT now(), id, id, topic_id, false, %s, '', 'application/json', '{}'
    FROM (SELECT gen_random_uuid() AS id) i, outbox.topic WHERE name = 'order.paid' RETURNING log_id, transaction_id
)
INSERT INTO outbox.op_log (transaction_id, decision, decided_by, log_ids)
SELECT transaction_id, 'C', 'P', ARRAY[log_id] FROM m
"""


def test_a_clean_history_has_no_fault(orders: Connection, broker: Connection) -> None:
    found = figures.read(orders, broker)
    assert (found.paid, found.shipments, found.points, found.clearances) == (2, 2, 2, 2)
    assert (found.lost, found.invented, found.doubled, found.dead) == (0, 0, 0, 0)
    assert found.settled
    assert found.states == {("order.paid", "committed"): 2}
    assert figures.paid_orders(orders) == {1, 2}


# A fault in the database of the orders, and what is counted then.
PLANTS: list[tuple[str, dict[str, int]]] = [
    ("DELETE FROM logistics_shipment WHERE order_id = 2", {"lost": 1}),
    ("DELETE FROM points_entry WHERE order_id = 2", {"lost": 1}),
    ("DELETE FROM cart_clearance WHERE order_id = 2", {"lost": 1}),
    ("INSERT INTO logistics_shipment (order_id, created_at) VALUES (3, now()), (99, now())", {"invented": 2}),
    ("INSERT INTO points_entry (order_id, customer, points, created_at) VALUES (99, 'z', 1, now())", {"invented": 1}),
    ("INSERT INTO cart_clearance (order_id, customer, created_at) VALUES (98, 'y', now())", {"invented": 1}),
    (
        "INSERT INTO cart_item (customer, product_slug, name, unit_price, quantity, order_id)"
        " VALUES ('a', 'ink', 'Ink', 1, 1, 1)",
        {"left_in_carts": 1},
    ),
    ("UPDATE payments_charge SET amount = 9.99 WHERE order_id = 1", {"charges_off": 1}),
    ("DELETE FROM payments_charge WHERE order_id = 1", {"charges_off": 1}),
    (
        "INSERT INTO payments_charge (order_id, number, amount, created_at) VALUES (3, 'ch_3', 30, now())",
        {"charges_off": 1},
    ),
    ("UPDATE income_shownminute SET income = 29.99", {"minutes_off": 1}),
    ("UPDATE income_shownminute SET orders = 3", {"minutes_off": 1}),
    ("DELETE FROM income_shownminute", {"minutes_off": 1}),
    (
        "INSERT INTO income_shownminute VALUES (date_trunc('minute', now()) - interval '1 hour', 5, 1, 1)",
        {"minutes_off": 1},
    ),
]
COUNTS = ("lost", "invented", "doubled", "dead", "left_in_carts", "charges_off", "minutes_off")


def test_each_planted_fault_is_counted(orders: Connection, broker: Connection) -> None:
    for plant, counted in PLANTS:
        with orders.transaction(force_rollback=True):
            orders.execute(plant.encode())
            found = figures.read(orders, broker)
        assert {name: getattr(found, name) for name in COUNTS} == {**dict.fromkeys(COUNTS, 0), **counted}, plant
        assert found.settled is (counted.keys() == {"invented"}), plant


def test_a_message_sent_twice_and_an_effect_that_was_tried_twice_are_doubled(
    orders: Connection, broker: Connection
) -> None:
    broker.execute(_MESSAGE, ["2"])
    assert figures.read(orders, broker).doubled == 1
    broker.execute(
        "INSERT INTO outbox.failure (group_id, log_id, attempt, error) VALUES"
        " (1, 1, 0, 'IntegrityError: duplicate key value violates unique constraint'),"
        " (1, 1, 1, 'OperationalError: gone')"
    )
    assert figures.read(orders, broker).doubled == 2


def _charge(order: int, **changes: Any) -> Charge:
    return Charge(**{"number": f"ch_{order}", "order": order, "amount": "1", "requests": 1, **changes})


@pytest.mark.parametrize(
    ("made", "wrong"),
    [
        ([_charge(1, requests=2), _charge(2)], []),
        ([_charge(1, requests=2)], ["paid orders with one charge", "charges at the provider"]),
        (
            [_charge(1, requests=2), _charge(2), _charge(2, number="again")],
            ["paid orders with one charge", "charges at the provider"],
        ),
        ([_charge(1, requests=2), _charge(2), _charge(3)], ["charges at the provider"]),
        ([_charge(1), _charge(2, requests=2)], ["killed in a payment, asked again"]),
    ],
)
def test_the_providers_charges_are_judged(made: list[Charge], wrong: list[str]) -> None:
    found = verdicts.of_charges(made, {1, 2}, PaymentKill(number="ch_1", order=1))
    assert [one.name for one in found if not one.good] == wrong


def test_a_charge_without_an_answer_is_found() -> None:
    answered, soon = _charge(1), _charge(2, slow_until=time.time() + 0.1)
    assert charges.unanswered([answered, soon]) is None
    late = _charge(3, slow_until=time.time() + 60)
    assert charges.unanswered([answered, soon, late]) is late
