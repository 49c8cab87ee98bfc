"""Limits that hold for several processes together: killed and frozen ones, and a change while they run."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.broker.bench import ROOT, ConsumptionBench, keyed
from tests.broker.limits.limited_process import TABLE
from tests.support import eventually

Spawn = Callable[..., "subprocess.Popen[bytes]"]

# The greatest number of calls that ran at the same time. A call of a killed process ends with its last sign of life,
# which is the begin of the newest call of this process.
_MOST = """
WITH span AS (
    SELECT key, began, coalesce(ended, max(began) OVER (PARTITION BY name)) AS ended FROM span
), change AS (
    SELECT key, began AS at, 1 AS change FROM span UNION ALL SELECT key, ended, -1 FROM span
), running AS (
    SELECT sum(change) OVER ({partition} ORDER BY at, change ROWS UNBOUNDED PRECEDING) AS number FROM change
)
SELECT max(number) FROM running
"""
MOST = _MOST.format(partition="")
MOST_OF_KEY = _MOST.format(partition="PARTITION BY key")


@pytest.fixture
def orders(bench: ConsumptionBench) -> ConsumptionBench:
    bench.declare("orders", queues=6)
    bench.connection.execute(TABLE)
    return bench


@pytest.fixture
def spawn(orders: ConsumptionBench, tmp_path: Path) -> Iterator[Spawn]:
    processes: list[subprocess.Popen[bytes]] = []

    def start(name: str, **options: Any) -> subprocess.Popen[bytes]:
        argument = json.dumps({"url": orders.url, "name": name, **options})
        command = [sys.executable, "-m", "tests.broker.limits.limited_process", argument]
        processes.append(subprocess.Popen(command, env={**os.environ, "PYTHONPATH": str(ROOT)}, cwd=ROOT))
        return processes[-1]

    yield start
    for process in processes:
        if process.poll() is None:
            process.send_signal(signal.SIGCONT)
            process.kill()
        process.wait()


def handled(bench: ConsumptionBench) -> int:
    return int(bench.rows("SELECT count(DISTINCT (key, n)) FROM span WHERE ended IS NOT NULL")[0][0])


def slots_held(bench: ConsumptionBench) -> int:
    return int(bench.rows("SELECT count(*) FROM outbox.slot WHERE expires_at > clock_timestamp()")[0][0])


@pytest.mark.slow
def test_running_is_exact_through_a_kill(orders: ConsumptionBench, spawn: Spawn) -> None:
    processes = [spawn(f"p{n}", limits={"running": 4}, seconds=0.02) for n in range(3)]
    orders.wait_for_shares(2, 2, 2)
    orders.publish(keyed("orders", 600, 60))
    eventually(lambda: handled(orders) >= 150, within_seconds=60)
    processes[0].kill()
    eventually(lambda: handled(orders) == 600, within_seconds=60)
    assert orders.rows(MOST) == [(4,)]
    # Each process has had slots, although three processes with 8 threads want 24 slots.
    assert orders.rows("SELECT count(DISTINCT name) FROM span") == [(3,)]
    eventually(lambda: slots_held(orders) == 0)


@pytest.mark.slow
def test_a_key_is_exact_with_retries_in_other_processes(orders: ConsumptionBench, spawn: Spawn) -> None:
    """The retry queue of the topic belongs to one process, and the queues of most keys to others."""
    with orders.sequencing():
        processes = [spawn(f"p{n}", limits={"per_key": 1}, seconds=0.01, fail=1) for n in range(3)]
        orders.wait_for_shares(2, 2, 2)
        orders.publish(keyed("orders", 200, 10))
        eventually(lambda: handled(orders) >= 30, within_seconds=60)
        processes[1].kill()
        done = "SELECT count(DISTINCT (key, n)) FROM span WHERE attempt > 1 AND ended IS NOT NULL"
        eventually(lambda: orders.rows(done) == [(200,)], within_seconds=60)
    assert orders.rows(MOST_OF_KEY) == [(1,)]
    together = """
        SELECT count(*) FROM span a JOIN span b ON a.name <> b.name AND a.key = b.key AND a.attempt <> b.attempt
    """
    assert orders.rows(together) != [(0,)]


@pytest.mark.slow
def test_control_without_the_limit_keys_overlap(orders: ConsumptionBench, spawn: Spawn) -> None:
    with orders.sequencing():
        for n in range(2):
            spawn(f"p{n}", limits={"running": 100}, seconds=0.01)
        orders.wait_for_shares(3, 3)
        orders.publish(keyed("orders", 200, 10))
        eventually(lambda: handled(orders) == 200, within_seconds=60)
    assert orders.rows(MOST_OF_KEY)[0][0] > 1


@pytest.mark.slow
def test_a_frozen_process_overlaps_at_most_once(orders: ConsumptionBench, spawn: Spawn) -> None:
    """The calls that ran when the process was frozen end after it continues. It starts no other call."""
    frozen = spawn("frozen", limits={"running": 2}, seconds=0.2)
    orders.wait_for_shares(6)
    orders.publish(keyed("orders", 300, 60))
    eventually(lambda: handled(orders) >= 2)
    frozen.send_signal(signal.SIGSTOP)
    spawn("heir", limits={"running": 2}, seconds=0.2)
    of_heir = "SELECT count(*) FROM span WHERE name = 'heir'"
    eventually(lambda: orders.rows(of_heir)[0][0] >= 10, within_seconds=30)
    [(resumed_at,)] = orders.rows("SELECT clock_timestamp()")
    frozen.send_signal(signal.SIGCONT)
    eventually(lambda: orders.rows("SELECT count(*) FROM span WHERE name = 'frozen' AND ended IS NULL") == [(0,)])
    eventually(lambda: orders.rows(of_heir)[0][0] >= 20, within_seconds=30)
    assert orders.rows(MOST)[0][0] <= 4
    # Only the two calls that were running at SIGSTOP overlap with others.
    overlapping = """
        SELECT count(*) FROM span a WHERE name = 'frozen' AND began < %s
          AND EXISTS (SELECT FROM span b WHERE b.name = 'heir' AND b.began < a.ended AND b.ended > a.began)
    """
    assert orders.rows(overlapping, resumed_at)[0][0] <= 2
    later = _MOST.format(partition="").replace("FROM span\n)", "FROM span WHERE began > %s\n)", 1)
    assert orders.rows(later, resumed_at)[0][0] <= 2


# -- the limit `rate`, measured with the clock of the database ----------------------------------------------

RATE = 20


def started_within(bench: ConsumptionBench, seconds: float) -> int:
    """How many calls began within this time after the first call."""
    began = "SELECT count(*) FROM span WHERE began < (SELECT min(began) FROM span) + make_interval(secs => %s)"
    return int(bench.rows(began, seconds)[0][0])


def passed(bench: ConsumptionBench, seconds: float) -> bool:
    since = "SELECT clock_timestamp() > min(began) + make_interval(secs => %s) FROM span"
    return bool(bench.rows(since, seconds)[0][0])


def test_two_processes_together_never_exceed_the_rate(orders: ConsumptionBench, spawn: Spawn) -> None:
    for name in ("a", "b"):
        spawn(name, limits={"rate": f"{RATE}/s"})
    orders.wait_for_shares(3, 3)
    orders.publish(keyed("orders", 200, 60))
    eventually(lambda: passed(orders, 3.0))
    # A call begins up to some milliseconds after its token is due, so the first call may be late.
    assert started_within(orders, 3.0) <= 3 * RATE + 2
    assert orders.rows("SELECT count(DISTINCT name) FROM span") == [(2,)]


@pytest.mark.slow
def test_the_rate_is_exact_within_two_per_cent_through_a_kill(orders: ConsumptionBench, spawn: Spawn) -> None:
    processes = [spawn(name, limits={"rate": f"{RATE}/s"}) for name in ("a", "b")]
    orders.wait_for_shares(3, 3)
    orders.publish(keyed("orders", 4_000, 60))
    eventually(lambda: passed(orders, 20.0), within_seconds=60)
    processes[0].kill()
    eventually(lambda: passed(orders, 60.0), within_seconds=90)
    assert started_within(orders, 60.0) == pytest.approx(60 * RATE, rel=0.02)
