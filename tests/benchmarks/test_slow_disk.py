"""The slow disk: its syncs are slow and counted, and the benchmark prints what it saw."""

from __future__ import annotations

import shutil
import subprocess
import sys
import time

import psycopg
import pytest

from benchmarks.slow_server import slow_server
from tests.benchmarks.support import number, tables

needs_compiler = pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler")


def test_without_a_compiler_it_is_left_out_by_name() -> None:
    command = [sys.executable, "-m", "benchmarks.slow_disk", "--way", "raw"]
    done = subprocess.run(command, env={"PATH": ""}, check=True, stdout=subprocess.PIPE, text=True)
    assert "left out: slow_disk: there is no C compiler" in done.stdout


@pytest.mark.slow
@needs_compiler
def test_a_commit_takes_a_sync_and_a_commit_that_does_not_wait_takes_none() -> None:
    with slow_server(20) as server, psycopg.connect(server.url, autocommit=True) as connection:
        connection.execute("CREATE TABLE t (n int)")
        pid = connection.info.backend_pid
        before, all_before = server.syncs(pid), server.syncs()
        started = time.perf_counter()
        for _ in range(5):
            connection.execute("INSERT INTO t VALUES (1)")
        # No bound above: the machine may be busy. Below it would be a disk that is not slow.
        assert time.perf_counter() - started > 5 * 0.020
        assert server.syncs(pid) - before == 5
        assert server.syncs() - all_before >= 5
        connection.execute("SET synchronous_commit TO off")
        before = server.syncs(pid)
        connection.execute("INSERT INTO t VALUES (1)")
        assert server.syncs(pid) == before


@pytest.mark.soak
@pytest.mark.timeout(600)
@needs_compiler
def test_small() -> None:
    chosen = ("--way", "this project", "--way", "raw psycopg")
    latency, added = tables("slow_disk", *chosen, OUTBOX_BENCH_LATENCY_SECONDS="1").values()
    names = ["this project, atomic", "this project, two-phase", "raw psycopg, NOTIFY"]
    assert [[row["way"] for row in rows] for rows in (latency, added)] == [names, names]
    assert all(0 < number(row["p50"]) <= number(row["p99"]) for row in latency)
    assert all(number(row["block without, ms"]) >= 2 and number(row["all syncs/message"]) > 0 for row in added)
    syncs = {row["way"]: number(row["its syncs with"]) for row in added}
    assert syncs["this project, two-phase"] > syncs["this project, atomic"] + 0.5
