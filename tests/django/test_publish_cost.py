"""The cost of one message in a web process: statements, round trips and bytes of WAL, on both paths."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Any

import pytest
from django.db import IntegrityError, connections, transaction
from django.db.transaction import TransactionManagementError
from psycopg.errors import UniqueViolation

from outbox.broker.postgres import PostgresBroker
from outbox.contrib.django import get_broker, publish, transactional_message
from outbox.contrib.django.engine.broker import flush
from outbox.contrib.django.ledger import ledger
from outbox.utils.ids import uuid7
from tests.django.shop.models import Order
from tests.round_trips import counted

pytestmark = pytest.mark.usefixtures("empty_log")


def order(number: str) -> None:
    with transaction.atomic():
        Order.objects.create(number=number)
        publish("orders", {"number": number}, key=number)


@transactional_message("orders", body=lambda number: {"number": number}, key=lambda number: number)
def decorated_order(number: str) -> None:
    Order.objects.create(number=number)


# Of a block with one write: on the application's connection, on the broker's, and those without waiting.
# BEGIN, the write, the message, COMMIT; BEGIN, the write, the ledger row, COMMIT, the look whether it is there.
COSTS = {"atomic": (4, 0, 1), "two_phase": (5, 1, 2)}
# The look whether the message is there is the last statement before COMMIT, on either path.
COSTS_DECORATED = {"atomic": (5, 0, 1), "two_phase": (5, 1, 2)}


@pytest.mark.parametrize(("publishes", "costs"), [(order, COSTS), (decorated_order, COSTS_DECORATED)])
def test_round_trips(path: str, publishes: Callable[[str], None], costs: dict[str, tuple[int, int, int]]) -> None:
    for number in range(2):
        # The connections are there after this, and what can be prepared is.
        publishes(f"warm-up {number}")
    broker = get_broker()
    assert isinstance(broker, PostgresBroker)
    assert flush(within_seconds=30)
    with contextlib.ExitStack() as stack:
        application, one_way, *halves = (
            stack.enter_context(counted(one))
            for one in (connections["default"].connection, broker._one_way._pgconn, *broker._pool._idle)
        )
        publishes("counted")
        assert flush(within_seconds=30)
        assert (application(), sum(one() for one in halves), one_way()) == costs[path]


@pytest.mark.parametrize("path", ["atomic"], indirect=True)
@pytest.mark.parametrize(("threshold", "prepared"), [(None, 0), (5, 1)])
def test_the_call_is_prepared_if_the_alias_allows_it(path: str, threshold: int | None, prepared: int) -> None:
    connections["default"].ensure_connection()
    session = connections["default"].connection
    before, session.prepare_threshold = session.prepare_threshold, threshold
    try:
        order("first")
        order("second")
        statements = session.execute("SELECT statement FROM pg_prepared_statements", prepare=False).fetchall()
    finally:
        session.prepare_threshold = before
        session.execute("DEALLOCATE ALL")
    assert sum("append_one" in statement for [statement] in statements) == prepared


def test_no_thread_of_ours_runs_in_a_process_that_publishes(path: str) -> None:
    before = set(threading.enumerate())
    order("first")
    order("second")
    assert flush(within_seconds=30)
    assert set(threading.enumerate()) == before


def test_bytes_of_wal(path: str) -> None:
    """The write of the block and all commits included."""
    written = []
    for number in range(30):
        before = _wal_position()
        order(f"order {number:03}")
        assert flush(within_seconds=30)
        written.append(_wal_position() - before)
    # Writes of other sessions, and an index page that splits, come in addition.
    assert min(written) <= {"atomic": 1_100, "two_phase": 1_500}[path]


def _wal_position() -> int:
    with connections["default"].cursor() as cursor:
        cursor.execute("SELECT pg_current_wal_insert_lsn() - '0/0'::pg_lsn")
        return int(cursor.fetchone()[0])


@pytest.mark.parametrize("before_publish", ["DEALLOCATE ALL", "DISCARD PLANS"])
def test_a_block_may_discard_its_sessions_statements(path: str, before_publish: str) -> None:
    """Nothing of the package is prepared on the application's connection, so no statement can be missing there."""
    for number in range(3):
        with transaction.atomic():
            Order.objects.create(number=f"{number}")
            connections["default"].connection.execute(before_publish)
            publish("orders", {}, key=f"{number}")
            connections["default"].connection.execute(before_publish)
    assert flush(within_seconds=30)
    assert Order.objects.count() == 3


@pytest.mark.parametrize("path", ["two_phase"], indirect=True)
def test_wrappers_of_the_application_see_the_statements_of_the_ledger(path: str) -> None:
    seen: list[str] = []

    def wrapper(execute: Callable[..., Any], sql: str, params: Any, many: bool, context: dict[str, Any]) -> Any:
        assert context["cursor"] is not None
        seen.append(sql)
        return execute(sql, params, many, context)

    with connections["default"].execute_wrapper(wrapper):
        order("first")
    assert sum("outbox_ledger" in sql for sql in seen) == 2
    seen.clear()
    order("second")
    assert seen == []


@pytest.mark.parametrize("path", ["two_phase"], indirect=True)
def test_an_error_of_a_ledger_statement_is_djangos(path: str) -> None:
    connection = connections["default"]
    item = uuid7()
    with transaction.atomic():
        ledger.insert_committed(connection, item)
    with pytest.raises(IntegrityError) as caught, transaction.atomic():
        ledger.insert_committed(connection, item)
    assert isinstance(caught.value.__cause__, UniqueViolation)
    assert ledger.committed(connection, [item, uuid7()]) == {item}
    assert ledger.committed(connection, []) == set()
    with transaction.atomic():
        transaction.set_rollback(True)
        with pytest.raises(TransactionManagementError):
            ledger.committed(connection, [item])
