"""`first_row` keeps its cursor on the connection, and every call still gets its own row."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import psycopg
import pytest

from outbox.broker.database.executor import Executor
from outbox.broker.database.sender import first_row
from outbox.broker.database.statement import INTEGER, TEXT, Statement

ECHO = Statement("SELECT $1::text, octet_length(convert_to($1::text, 'UTF8'))", [TEXT], [TEXT, INTEGER])
DIVIDE = Statement("SELECT 10 / $1::integer", [INTEGER], [INTEGER])


@pytest.fixture
def run(server_url: str) -> Iterator[Executor]:
    with psycopg.connect(server_url, autocommit=True) as connection:
        yield Executor(connection, "outbox")


def test_a_call_after_an_error_works(run: Executor) -> None:
    assert first_row(run, DIVIDE, (5,)) == (2,)
    with pytest.raises(psycopg.errors.DivisionByZero):
        first_row(run, DIVIDE, (0,))
    assert first_row(run, DIVIDE, (2,)) == (5,)


def test_values_are_sent_in_the_present_encoding_of_the_session(run: Executor) -> None:
    assert first_row(run, ECHO, ("é",)) == ("é", 2)
    run.connection.execute("SET client_encoding TO latin1")
    assert first_row(run, ECHO, ("é",)) == ("é", 2)
    run.connection.execute("SET client_encoding TO utf8")
    assert first_row(run, ECHO, ("é",)) == ("é", 2)


def test_a_call_of_another_thread_on_the_same_connection_does_not_change_the_row(
    run: Executor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other call comes between the statement and the reading of its row. Fails if the calls share the cursor."""
    rows: list[object] = []

    class Interrupted(psycopg.RawCursor[tuple[Any, ...]]):
        def fetchall(self) -> list[tuple[Any, ...]]:
            if not rows:
                rows.append("the other call has begun")
                rows.append(first_row(run, ECHO, ("other",)))
            return super().fetchall()

    monkeypatch.setattr(psycopg, "RawCursor", Interrupted)
    assert first_row(run, ECHO, ("é",)) == ("é", 2)
    assert rows[1] == ("other", 5)
    rows.clear()
    assert first_row(run, ECHO, ("é",)) == ("é", 2)
    assert rows[1] == ("other", 5)
