"""The scenarios beside peers: what is counted as lost, as done twice and as late, and the rows of the table."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from datetime import UTC, datetime

import psycopg
import pytest

from benchmarks.scenarios import __main__ as table
from benchmarks.scenarios import cell, counting
from benchmarks.scenarios.contract import EFFECT, ORDER, TABLES
from benchmarks.scenarios.faults import SCENARIOS
from outbox.broker import embedded
from tests.servers import private_postgres


@pytest.fixture
def connection(monkeypatch: pytest.MonkeyPatch) -> Iterator[psycopg.Connection]:
    """A server of its own, because the scenarios need commit timestamps."""
    monkeypatch.delenv(embedded.URL_VARIABLE, raising=False)
    with private_postgres(**cell.SERVER_SETTINGS) as (_, url), psycopg.connect(url, autocommit=True) as connection:
        connection.execute(TABLES)
        yield connection


def test_lost_twice_late_and_unasked_effects_are_counted(connection: psycopg.Connection) -> None:
    """Ten orders: the last has no effect, one has three, one has a late one. One effect has no order."""
    orders = [connection.execute(ORDER).fetchall()[0][0] for _ in range(10)]
    with connection.transaction(force_rollback=True):
        connection.execute(ORDER)
    began = datetime.now(UTC)
    for order in [*orders[:8], orders[0], orders[0], 999]:
        connection.execute(EFFECT, [order])
    half = datetime.now(UTC)
    assert counting.missing(connection)[0] == 2
    time.sleep(0.3)
    late = connection.execute(ORDER).fetchall()[0][0]
    connection.execute(EFFECT, [orders[8]])
    connection.execute(EFFECT, [late])
    found = counting.count(connection, since=datetime.fromtimestamp(0, UTC))
    assert (found.orders, found.lost, found.twice, found.phantoms) == (11, 1, 1, 1)
    assert 300 <= found.p99_ms < 5000
    assert counting.count(connection, since=half).p99_ms < 300
    seconds = (half - began).total_seconds()
    assert counting.rate(connection, began, half) * seconds == pytest.approx(9)


def test_the_row_of_a_system_that_misses_the_rate_says_so() -> None:
    counted = counting.Counted(orders=1000, lost=3, twice=2, phantoms=0, p99_ms=1234.5)
    dead = Counter({"queue": 201.0, "lease": 0.4})
    outcomes = [cell.Outcome(counted, before=before, during=5, recovered=50, dead_rows=dead) for before in (80, 60)]
    system = cell.CONTESTANTS[0]
    slow = table.row(SCENARIOS[0], system, outcomes, rate=100)
    assert slow[2:] == [
        *("70 (60 to 80)", "5 (5 to 5)", "50 (50 to 50)", "1,234 (1,234 to 1,234)"),
        *("3 (3 to 3)", "2 (2 to 2)", "201 (201 to 201)", "no, 70 of 100/s"),
    ]
    assert table.row(SCENARIOS[0], system, outcomes[:1], rate=80)[2:] == [
        *("80", "5", "50", "1,234", "3", "2", "201", "yes"),
    ]
    assert len(slow) == len(table.HEADER)
    assert table.dead_rows(system, outcomes[:1]) == [
        [system.name, "queue", "201.0"],
        [system.name, "lease", "0.4"],
    ]


def test_an_adapter_tells_the_public_benchmark_where_it_keeps_messages() -> None:
    command = [sys.executable, "-m", "benchmarks.scenarios.this_project", "--manifest"]
    manifest = json.loads(subprocess.run(command, env=os.environ, check=True, stdout=subprocess.PIPE).stdout)
    assert manifest["system"] == "this-project"
    assert manifest["db_name"] == "this_project_bench"
    assert "outbox.commit_log" in manifest["event_tables"]
    assert manifest["extensions"] == manifest["event_indexes"] == []
