"""A statement that libpq sends stores and returns what psycopg's cursor stores and returns; several travel together."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

import psycopg
import pytest
from psycopg.rows import dict_row

from outbox.broker.database.connection import BrokerConnection, BrokerDatabase
from outbox.broker.database.executor import Executor
from outbox.broker.database.sender import RoundTrip, can_send, first_row
from outbox.broker.database.statement import INTEGER, Statement
from outbox.broker.log import commit_log
from outbox.broker.log.topics import TopicCatalog
from outbox.errors import BrokerUnavailable
from outbox.message import Message
from outbox.transaction import HalfTransaction
from outbox.utils.ids import uuid7

NOON = datetime(2026, 5, 1, 12, 0, 0, 1, tzinfo=UTC)
LEDGER = UUID("01a20786-33b5-7750-8cee-7a36cfabe58b")
DOUBLE = Statement("SELECT 2 * $1::integer", [INTEGER], [INTEGER])
SLEEP = Statement("SELECT 1 FROM pg_sleep($1::integer)", [INTEGER], [INTEGER])

VARIANTS: list[dict[str, Any]] = [
    {},
    {"body": b"", "key": "", "tag": ""},
    {"body": b"\x00\xff", "key": "ü'\"{}\\", "tag": "t", "content_type": "text/plain", "shard": 3},
    {"headers": {"a": "ü\"'{}", "b": ""}, "born_at": datetime(1969, 12, 31, 23, 59, 59, 999_999, tzinfo=UTC)},
]
DELAYED: list[dict[str, Any]] = [{"deliver_at": NOON}, {"delay": timedelta(seconds=1.5)}]


@pytest.fixture
def prepared(connection: BrokerConnection) -> Callable[[], list[str]]:
    """The statements of this package that are prepared on the connection."""
    return lambda: [
        name for (name,) in connection.execute("SELECT name FROM pg_prepared_statements WHERE name LIKE 'outbox%'")
    ]


def stored(connection: BrokerConnection, sent: Message) -> dict[str, Any]:
    """The row of a message without what differs from row to row, and with its delay instead of its delivery time."""
    cursor = connection.cursor(row_factory=dict_row)
    row = cursor.execute("SELECT * FROM outbox.commit_log WHERE message_id = %s", [sent.message_id]).fetchone()
    assert row is not None
    assert row["transaction_id"] == row["message_id"]
    left_out = {"log_id", "message_id", "transaction_id", "xid", "stored_at"}
    if sent.delay is not None:
        assert row.pop("deliver_at") > datetime.now(UTC)
    return {name: value for name, value in row.items() if name not in left_out}


@pytest.mark.parametrize("fields", [*VARIANTS, *DELAYED])
@pytest.mark.parametrize("is_half", [True, False])
def test_rows_of_messages_are_the_same(connection: BrokerConnection, fields: dict[str, Any], is_half: bool) -> None:
    """In a pipeline, psycopg sends the statement."""
    run, catalog = Executor(connection, "outbox"), TopicCatalog("outbox")
    given: dict[str, Any] = {"topic": "orders", "body": b"{}", "born_at": NOON} | fields
    first = Message(**given)
    sent = [first, replace(first, message_id=uuid7())]
    rows = []
    ways: list[Callable[[], contextlib.AbstractContextManager[Any]]] = [contextlib.nullcontext, connection.pipeline]
    for message, way in zip(sent, ways, strict=True):
        with way():
            if is_half:
                half = HalfTransaction(producer_group="g", messages=[message], ledger_id=LEDGER, immunity_seconds=7)
                [receipt] = commit_log.append_half(run, catalog, half)
            else:
                [receipt] = commit_log.append_decided(run, catalog, [message], producer_group="g")
        rows.append((stored(connection, message), type(receipt.position)))
    assert rows[0] == rows[1]


def test_a_direct_connection_of_the_broker_prepares_a_statement_once(
    connection: BrokerConnection, prepared: Callable[[], list[str]]
) -> None:
    run = Executor(connection, "outbox")
    assert [first_row(run, DOUBLE, [number]) for number in range(3)] == [(0,), (2,), (4,)]
    assert len(prepared()) == 1
    assert first_row(run, DOUBLE, [None]) == (None,)


def test_a_statement_that_is_not_prepared_any_more_is_sent_again(
    connection: BrokerConnection, prepared: Callable[[], list[str]]
) -> None:
    run = Executor(connection, "outbox")
    first_row(run, DOUBLE, [1])
    connection.execute("DEALLOCATE ALL")
    assert [first_row(run, DOUBLE, [number]) for number in range(3)] == [(0,), (2,), (4,)]
    assert prepared() == []


def test_in_a_transaction_no_prepared_statement_can_be_missing(connection: BrokerConnection) -> None:
    run = Executor(connection, "outbox")
    first_row(run, DOUBLE, [1])
    connection.execute("DEALLOCATE ALL")
    with connection.transaction():
        assert first_row(run, DOUBLE, [1]) == (2,)


def test_psycopg_deallocates_after_a_rollback(connection: BrokerConnection, prepared: Callable[[], list[str]]) -> None:
    run = Executor(connection, "outbox")
    first_row(run, DOUBLE, [1])
    connection.execute("SELECT 1", prepare=True)
    with contextlib.suppress(ZeroDivisionError), connection.transaction():
        raise ZeroDivisionError
    connection.execute("SELECT 1")
    assert prepared() == []
    assert first_row(run, DOUBLE, [1]) == (2,)


def test_a_connection_of_the_application_prepares_nothing(broker_url: str) -> None:
    """And so nothing that the application deallocates can fail."""
    with contextlib.closing(psycopg.connect(broker_url, prepare_threshold=None)) as connection:
        run = Executor(connection, "outbox")
        for _ in range(10):
            connection.execute("SELECT 1")
            assert first_row(run, DOUBLE, [1]) == (2,)
            assert connection.execute("SELECT * FROM pg_prepared_statements").fetchall() == []
            connection.execute("DEALLOCATE ALL")
        connection.commit()
        # The statement is the first one of the transaction, so psycopg has to send BEGIN.
        assert first_row(run, DOUBLE, [1]) == (2,)
        assert connection.info.transaction_status == psycopg.pq.TransactionStatus.INTRANS


def test_a_value_of_another_type_is_left_to_psycopg(connection: BrokerConnection) -> None:
    assert first_row(Executor(connection, "outbox"), DOUBLE, ["4"]) == (8,)


def test_the_deadline_of_a_connection_holds(database: BrokerDatabase) -> None:
    with contextlib.closing(database.open(name="test")) as connection:
        run = Executor(connection, "outbox")
        with pytest.raises(BrokerUnavailable), connection.within(time.monotonic() + 0.2):
            first_row(run, SLEEP, [30])
        assert connection.closed


def test_an_error_names_its_state(connection: BrokerConnection) -> None:
    with pytest.raises(psycopg.errors.NumericValueOutOfRange):
        first_row(Executor(connection, "outbox"), DOUBLE, [2**31 - 1])


def test_only_a_connection_that_can_send_now_is_used(broker_url: str) -> None:
    with contextlib.closing(psycopg.connect(broker_url, autocommit=True)) as connection:
        assert can_send(connection)
        with connection.pipeline():
            assert not can_send(connection)
        for encoding, expected in (("latin1", False), ("utf8", True)):
            connection.execute(f"SET client_encoding TO {encoding}")
            assert can_send(connection) is expected
        with contextlib.suppress(psycopg.Error), connection.transaction():
            with contextlib.suppress(psycopg.Error):
                connection.execute("SELECT 1/0")
            assert not can_send(connection)
        connection.close()
        assert not can_send(connection)


# -- several statements ---------------------------------------------------------------------------


def test_statements_that_travel_together_stop_at_the_first_error(connection: BrokerConnection) -> None:
    names: dict[bytes, bytes] = {}
    for prepared in (None, names, names):
        trip = RoundTrip(connection, "outbox", prepared=prepared)
        trip.send(Statement("BEGIN"))
        trip.send(Statement("SELECT %(n)s::integer, NULL, true, %(n)s::integer + 1"), {"n": b"7"})
        trip.send(Statement("SELECT 1 / 0"))
        trip.send(Statement("COMMIT"))
        rows, error = trip.finish_all()
        connection.rollback()
        assert rows == [[], [(b"7", None, b"t", b"8")]]
        assert isinstance(error, psycopg.errors.DivisionByZero)
