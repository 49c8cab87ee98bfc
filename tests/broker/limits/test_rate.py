"""The limit `rate` over two processes, measured with the clock of the database."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.broker.bench import ROOT, ConsumptionBench, keyed
from tests.broker.limits.limited_process import TABLE
from tests.support import eventually

_RATE = 20


@contextmanager
def two_processes(bench: ConsumptionBench, limits: str) -> Iterator[list[subprocess.Popen[bytes]]]:
    bench.declare("orders", queues=6)
    bench.connection.execute(TABLE)
    processes = []
    try:
        for name in ("a", "b"):
            argument = f'{{"url": "{bench.url}", "name": "{name}", "limits": {limits}}}'
            command = [sys.executable, "-m", "tests.broker.limits.limited_process", argument]
            processes.append(subprocess.Popen(command, env={**os.environ, "PYTHONPATH": str(ROOT)}, cwd=ROOT))
        bench.wait_for_shares(3, 3)
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.wait()


def started_within(bench: ConsumptionBench, seconds: float) -> int:
    """How many calls began within this time after the first call."""
    return int(
        bench.rows(
            "SELECT count(*) FROM span WHERE began < (SELECT min(began) FROM span) + make_interval(secs => %s)", seconds
        )[0][0]
    )


def passed(bench: ConsumptionBench, seconds: float) -> bool:
    return bool(
        bench.rows("SELECT clock_timestamp() > min(began) + make_interval(secs => %s) FROM span", seconds)[0][0]
    )


def test_two_processes_together_never_exceed_the_rate(bench: ConsumptionBench) -> None:
    with two_processes(bench, f'{{"rate": "{_RATE}/s"}}'):
        bench.publish(keyed("orders", 200, 60))
        eventually(lambda: passed(bench, 3.0))
    # A call begins up to some milliseconds after its token is due, so the first call may be late.
    assert started_within(bench, 3.0) <= 3 * _RATE + 2
    assert bench.rows("SELECT count(DISTINCT name) FROM span") == [(2,)]


@pytest.mark.slow
def test_the_rate_is_exact_within_two_per_cent_through_a_kill(bench: ConsumptionBench) -> None:
    with two_processes(bench, f'{{"rate": "{_RATE}/s"}}') as processes:
        bench.publish(keyed("orders", 4_000, 60))
        eventually(lambda: passed(bench, 20.0), within_seconds=60)
        processes[0].kill()
        eventually(lambda: passed(bench, 60.0), within_seconds=90)
    assert started_within(bench, 60.0) == pytest.approx(60 * _RATE, rel=0.02)
