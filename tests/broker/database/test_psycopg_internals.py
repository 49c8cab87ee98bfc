"""What outbox uses of psycopg beyond its documentation behaves as it was read (psycopg 3.2.2 to 3.3.9)."""

from __future__ import annotations

import re
import select
from pathlib import Path
from typing import Any

import psycopg
from psycopg.adapt import PyFormat
from psycopg.pq import ExecStatus

import outbox
from outbox.broker.database import psycopg_internals
from outbox.broker.database.connection import BrokerConnection
from outbox.broker.database.executor import cursor_on
from outbox.broker.database.psycopg_internals import (
    READY_R,
    READY_RW,
    READY_W,
    WAIT_W,
    PGconn,
    Ready,
    Transformer,
    Wait,
    begin_command,
    connect_generator,
    error_from_result,
    execute_generator,
)

# The methods and attributes of PGconn that the package uses.
PGCONN = re.compile(r"pgconn\.(\w+)")


def test_a_connection_is_made_in_steps(broker_url: str) -> None:
    steps = connect_generator(broker_url)
    descriptor, wanted = next(steps)
    assert isinstance(wanted, Wait)
    try:
        while True:
            ready = READY_W if wanted & WAIT_W else READY_R
            poll = select.poll()
            poll.register(descriptor, select.POLLOUT if ready is READY_W else select.POLLIN)
            assert poll.poll(30_000)
            descriptor, wanted = steps.send(ready)
    except StopIteration as done:
        pgconn: PGconn = done.value
    assert pgconn.backend_pid > 0
    pgconn.finish()


def test_both_directions_together_are_each_of_them() -> None:
    assert isinstance(READY_RW, Ready)
    assert READY_RW & READY_R == READY_R and READY_RW & READY_W == READY_W and not READY_R & READY_W


def test_the_options_of_a_connection_are_in_its_begin(connection: BrokerConnection) -> None:
    assert begin_command(connection) == b"BEGIN"
    connection.isolation_level, connection.read_only = psycopg.IsolationLevel.SERIALIZABLE, True
    assert begin_command(connection) == b"BEGIN ISOLATION LEVEL SERIALIZABLE READ ONLY"
    connection.isolation_level = connection.read_only = None
    assert begin_command(connection) == b"BEGIN"


def test_one_statement_is_executed_in_steps(connection: BrokerConnection) -> None:
    """`Connection.wait` runs the steps, and `Connection.lock` keeps other threads away."""
    with connection.lock:
        assert not connection.lock.acquire(blocking=False)
        connection.pgconn.send_query(b"SELECT 1, NULL")
        *_, result = connection.wait(execute_generator(connection.pgconn))
    assert result.status == ExecStatus.TUPLES_OK
    assert [result.get_value(0, column) for column in range(result.nfields)] == [b"1", None]


def test_a_cursor_waits_by_the_method_that_a_deadline_overrides(broker_url: str) -> None:
    class Noted(psycopg.Connection[Any]):
        waits = 0

        def wait(self, gen: Any, interval: float = 0.1, *args: Any, **kwargs: Any) -> Any:
            assert hasattr(gen, "send") and interval > 0
            type(self).waits += 1
            return super().wait(gen, interval, *args, **kwargs)

    with Noted.connect(broker_url, autocommit=True) as noted:
        before = Noted.waits
        noted.execute("SELECT 1")
        assert Noted.waits > before


def test_an_error_has_the_class_and_the_state_of_the_server(connection: BrokerConnection) -> None:
    connection.pgconn.send_query(b"SELECT 1 / 0")
    *_, result = connection.wait(execute_generator(connection.pgconn))
    error = error_from_result(result, encoding="utf-8")
    assert isinstance(error, psycopg.errors.DivisionByZero)
    assert (error.sqlstate, str(error)) == ("22012", "division by zero")


def test_a_transformer_has_the_loaders_of_its_cursor(connection: BrokerConnection) -> None:
    adapter = Transformer(cursor_on(connection))
    values = adapter.dump_sequence([7, None], [PyFormat.AUTO] * 2)
    assert values[1] is None and adapter.types is not None and adapter.formats is not None
    text = b"SELECT $1::integer, $2::text, '[1]'::jsonb"
    connection.pgconn.send_query_params(text, values, adapter.types, adapter.formats, psycopg.pq.Format.BINARY)
    *_, result = connection.wait(execute_generator(connection.pgconn))
    adapter.set_pgresult(result)
    assert adapter.load_rows(0, result.ntuples, tuple) == [(7, None, [1])]


def test_the_connection_of_libpq_has_what_is_used(connection: BrokerConnection) -> None:
    package = Path(outbox.__file__).parent
    used = {name for path in package.rglob("*.py") for name in PGCONN.findall(path.read_text(encoding="utf-8"))}
    assert used
    assert {name for name in used if not hasattr(connection.pgconn, name)} == set()


def test_no_other_module_imports_them() -> None:
    package = Path(outbox.__file__).parent
    wanted = re.compile(
        r"psycopg\.(generators|waiting|pq\.abc|_)|from psycopg import .*\b(generators|waiting)\b"
        r"|psycopg\.(adapt|abc|errors) import .*\b(Transformer|PQGen|PQGenConn|error_from_result)\b"
    )
    found = {path.name for path in package.rglob("*.py") if wanted.search(path.read_text(encoding="utf-8"))}
    assert found == {"psycopg_internals.py"}
    assert all(hasattr(psycopg_internals, name) for name in psycopg_internals.__all__)
