"""What each fast path of the broker does, plain psycopg does too."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

import pytest
from psycopg.errors import DivisionByZero

from outbox.broker.database.connection import BrokerConnection, BrokerDatabase
from outbox.broker.database.executor import Executor
from outbox.broker.database.statement import Request, Statement
from outbox.broker.fastpath import arrays, switch
from outbox.broker.fastpath.one_way import OneWay, Waiting, one_way
from outbox.broker.fastpath.round_trip import OneByOne, RoundTrip, round_trip
from outbox.broker.postgres import PostgresBroker
from tests.broker.support import end, half, message

ID = UUID("01a20786-33b5-7750-8cee-7a36cfabe58b")
NOON = datetime(2026, 5, 1, 12, 0, 0, 1, tzinfo=UTC)

ARRAYS: list[tuple[Callable[[Any], arrays.Array], list[Any], Statement]] = [
    (arrays.uuids, [ID], Statement("SELECT %(given)s::uuid[]::text")),
    (arrays.texts, ["a", "ü{,}\"'", ""], Statement("SELECT %(given)s::text[]::text")),
    (arrays.blobs, [b"\x00\xff", b""], Statement("SELECT %(given)s::bytea[]::text")),
    (arrays.integers, [1, -(2**31)], Statement("SELECT %(given)s::integer[]::text")),
    (arrays.bigints, [1, 2**40], Statement("SELECT %(given)s::bigint[]::text")),
    (arrays.xids, [3, 2**63 + 1], Statement("SELECT %(given)s::xid8[]::text")),
    (arrays.optional_integers, [3, None], Statement("SELECT %(given)s::integer[]::text")),
    (arrays.times, [NOON, None], Statement("SELECT %(given)s::timestamptz[]::text")),
    (arrays.durations, [timedelta(seconds=1.5), None], Statement("SELECT %(given)s::float8[]::text")),
    (arrays.header_maps, [{"a": "ü\"'{}"}, {}], Statement("SELECT %(given)s::jsonb[]::text")),
]


@pytest.fixture
def off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(switch, "enabled", False)


@pytest.mark.parametrize(("encode", "values", "shown"), ARRAYS, ids=[encode.__name__ for encode, _, _ in ARRAYS])
def test_arrays_have_the_same_elements(
    connection: BrokerConnection,
    monkeypatch: pytest.MonkeyPatch,
    encode: Callable[[Any], arrays.Array],
    values: list[Any],
    shown: Statement,
) -> None:
    run = Executor(connection, "outbox")
    fast = [run.one(shown, {"given": encode(given)}) for given in (values, [])]
    monkeypatch.setattr(switch, "enabled", False)
    assert not isinstance(encode(values), bytes)
    assert [run.one(shown, {"given": encode(given)}) for given in (values, [])] == fast


def test_statements_one_by_one_give_the_same_rows_and_stop_at_the_same_error(
    connection: BrokerConnection, monkeypatch: pytest.MonkeyPatch
) -> None:
    def outcome() -> Any:
        trip = round_trip(connection, "outbox", prepare=False)
        trip.send(Statement("BEGIN"))
        trip.send(Statement("SELECT %(n)s::integer, NULL, true, %(n)s::integer + 1"), {"n": b"7"})
        trip.send(Statement("SELECT 1 / 0"))
        trip.send(Statement("COMMIT"))
        rows, error = trip.finish_all()
        connection.rollback()
        return type(trip), rows, type(error)

    assert outcome() == (RoundTrip, [[], [(b"7", None, b"t", b"8")]], DivisionByZero)
    monkeypatch.setattr(switch, "enabled", False)
    assert outcome() == (OneByOne, [[], [(b"7", None, b"t", b"8")]], DivisionByZero)


@pytest.mark.usefixtures("off")
def test_ends_and_hints_are_stored_when_the_call_returns(
    database: BrokerDatabase, connection: BrokerConnection
) -> None:
    broker = PostgresBroker(database)
    ended, hinted = half(message()), half(message())
    for one in (ended, hinted):
        broker.send_half(one)
    broker.end_one_way(end(ended.transaction_id))
    broker.hint_one_way(hinted.transaction_id)
    assert broker._one_way.dropped == 0
    assert broker.flush(within_seconds=0)
    assert connection.execute("SELECT transaction_id, decision FROM outbox.op_log").fetchall() == [
        (ended.transaction_id, "C")
    ]
    assert connection.execute("SELECT transaction_id FROM outbox.pending_check").fetchall() == [
        (hinted.transaction_id,)
    ]
    broker.close()


@pytest.mark.usefixtures("off")
def test_a_request_that_is_refused_or_has_no_server_fails_no_caller(
    database: BrokerDatabase, caplog: pytest.LogCaptureFixture
) -> None:
    sender = one_way(database)
    assert isinstance(sender, Waiting)
    sender.send(Request(b"SELECT 1 / 0", (), "a division"))
    assert "a division was not sent or failed" in caplog.text
    sender.close()
    away: OneWay = one_way(BrokerDatabase("host=/nowhere"))
    for _ in range(3):
        away.send(Request(b"SELECT 1", (), "a look"))
    assert away.dropped == 3
