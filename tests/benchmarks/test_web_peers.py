"""The comparison of the web job, small: its rows, and that its figures come from the run."""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks import processes
from benchmarks.peers import environments, ways
from benchmarks.peers.ways import Way
from tests.benchmarks.support import number, tables

_SMALL = {"OUTBOX_BENCH_TRANSACTIONS": "120", "OUTBOX_BENCH_LATENCY_SECONDS": "1"}


def test_it_compares_both_paths_with_every_peer() -> None:
    compared = [way.name for way in ways.EVERY]
    for path in ("atomic", "two-phase"):
        assert {f"this project, {path}", f"this project, {path}, inbox"} <= set(compared)
    for peer in ("django-reliable-outbox", "procrastinate", "pgmq", "Celery + Redis", "raw psycopg"):
        assert any(name.startswith(peer) for name in compared), peer


def test_a_peer_without_its_environment_is_left_out_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environments, "FOLDER", tmp_path)
    assert "no environment procrastinate" in Way("procrastinate", "procrastinate_tasks", "procrastinate", ()).left_out()
    assert "nonesuch is not on the PATH" in Way("x", "raw", "", (), program="nonesuch").left_out()
    assert ways.RAW.left_out() == ""


def test_type_parameters_are_all_that_is_taken_from_a_peer(tmp_path: Path) -> None:
    source = (
        '"""Words."""\n\nclass Job[**P, R]:\n    def run[T: int](self, given: T) -> T:\n        return [given][0]\n'
    )
    (tmp_path / "jobs.py").write_text(source)
    environments.without_type_parameters(tmp_path)
    changed = (tmp_path / "jobs.py").read_text()
    expected = source.replace("Job[**P, R]", "Job").replace("run[T: int]", "run")
    assert changed == "from __future__ import annotations\n" + expected
    compile(changed, "jobs.py", "exec")


def test_cpu_of_a_process_that_works_and_of_one_that_waits() -> None:
    waiting = subprocess.Popen([sys.executable, "-S", "-c", "input()"], stdin=subprocess.PIPE)
    working = subprocess.Popen([sys.executable, "-S", "-c", "while True: pass"])
    try:
        while (used := processes.read(working.pid)) is None or used.seconds < 0.3:
            time.sleep(0.01)
        idle = processes.read(waiting.pid)
        assert idle is not None
        assert idle.seconds < used.seconds
        assert {process.pid for process in processes.tree(processes.read(waiting.pid).parent)} >= {  # type: ignore[union-attr]
            waiting.pid,
            working.pid,
        }
    finally:
        for process in (waiting, working):
            process.kill()
            process.communicate()
    assert processes.read(waiting.pid) is None


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_small() -> None:
    chosen = ("--way", "this project", "--way", "raw psycopg")
    printed = tables("web_peers", *chosen, **_SMALL)
    names = [*(way.name for way in ways.OURS), ways.RAW.name]
    assert [[row["way"] for row in rows] for rows in printed.values()] == [names] * 4
    throughput, cpu, steady_cpu, latency = printed.values()
    by_name = {row["way"]: row for row in throughput}
    assert all(number(row["messages/s"]) > 0 and number(row["WAL bytes/message"]) > 250 for row in throughput)
    # The half, its end and the handler's inbox are commits of their own.
    commits = {name: number(row["commits/message"]) for name, row in by_name.items()}
    assert commits["this project, two-phase"] > commits["this project, atomic"]
    assert commits["this project, atomic, inbox"] > commits["this project, atomic"]
    assert all(row["ratio to django-reliable-outbox"] == "-" for row in throughput)
    assert all(number(row["web"]) > 0 and number(row["all behind the web process"]) > 0 for row in cpu + steady_cpu)
    assert all(0 < number(row["p50"]) <= number(row["p95"]) <= number(row["p99"]) for row in latency)


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_compared_with_another_checkout(tmp_path: Path) -> None:
    """The other one is a copy that records its importers: the processes of one way, and none of this version."""
    shutil.copytree(environments.ROOT / "outbox", tmp_path / "outbox")
    used = tmp_path / "used"
    with (tmp_path / "outbox" / "__init__.py").open("a") as file:
        file.write(f"\nimport os\nwith open({str(used)!r}, 'a') as f:\n    f.write(os.environ['PYTHONPATH'] + '\\n')\n")
    printed = tables("web_peers", "--way", "two-phase, inbox", "--before", str(tmp_path), **_SMALL)
    # Preparing, the web process, the worker's parent and its two children.
    assert len(importers := used.read_text().splitlines()) >= 5
    assert all("overlay" in path for path in importers)
    throughput = next(iter(printed.values()))
    assert [row["way"] for row in throughput] == [
        "this project, two-phase, inbox",
        "this project, two-phase, inbox, before",
    ]
    assert [row["ratio to the version before"] == "-" for row in throughput] == [False, True]
