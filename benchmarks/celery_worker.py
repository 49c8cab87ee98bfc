"""`celery worker` with and without `--outbox`, idle: processes, memory, CPU, statements, and the time to start.

Memory is proportional (PSS): what processes share is divided among them. The worker has one slot in its pool.
Each figure is the median of five runs (OUTBOX_BENCH_REPEATS), with the least and the most. To compare two versions, run
it in a checkout of each, while nothing else runs.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psycopg

from benchmarks.harness import REPEATS, Spread, server, table
from outbox.broker import embedded

ROOT = Path(__file__).resolve().parent.parent
IDLE_SECONDS = float(os.environ.get("OUTBOX_BENCH_IDLE_SECONDS", "15"))
CASES = {
    "worker": [],
    "worker --beat": ["--beat"],
    "worker --outbox": ["--outbox"],
    "worker --beat --outbox": ["--beat", "--outbox", "--queues=celery,outbox"],
}
_TICKS = os.sysconf("SC_CLK_TCK")
PROJECT = re.compile(r"^```python\n# ([\w/]+\.py)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def main() -> None:
    """Print one line per case."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    with server() as url, tempfile.TemporaryDirectory(prefix="outbox-bench-celery-") as folder:
        environment = _project(Path(folder), url)
        rows = []
        for name, options in CASES.items():
            runs = [_run(Path(folder), environment, options) for _ in range(REPEATS)]
            figures = [Spread.of(values) for values in zip(*runs, strict=True)]
            rows.append([name, *(f"{figure:.1f}" for figure in figures)])
        table("Celery worker, idle", ["", "ready s", "children s", "processes", "MB", "CPU ms/s", "statements/s"], rows)


def _project(folder: Path, url: str) -> dict[str, str]:
    """The project of docs/celery.md, migrated; returns its environment."""
    for path, text in PROJECT.findall((ROOT / "docs" / "celery.md").read_text(encoding="utf-8")):
        target = folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)
    environment = {
        **os.environ,
        "PYTHONPATH": f"{folder}{os.pathsep}{ROOT}",
        "DATABASE_URL": embedded.create_database(url, "shop"),
        "OUTBOX_DATABASE_URL": embedded.create_database(url, "outbox"),
        # No transport of its own to pay for.
        "CELERY_BROKER_URL": "filesystem://",
    }
    with (folder / "shop" / "settings.py").open("a") as file:
        file.write(f"CELERY_BROKER_TRANSPORT_OPTIONS = {{'data_folder_in': {str(folder)!r}, ")
        file.write(f"'data_folder_out': {str(folder)!r}, 'control_folder': {str(folder / 'control')!r}}}\n")
    for command in (["makemigrations", "shop"], ["migrate"], ["migrate", "--database=broker"]):
        subprocess.run(
            [sys.executable, "manage.py", *command], cwd=folder, env=environment, check=True, capture_output=True
        )
    return environment


def _run(
    folder: Path, environment: dict[str, str], options: list[str]
) -> tuple[float, float, float, float, float, float]:
    log = folder / "log"
    command = [sys.executable, "-m", "celery", "-A", "shop", "worker", "--concurrency=1", "--loglevel=INFO"]
    command += ["--without-gossip", "--without-mingle", f"--schedule={folder / 'beat'}", *options]
    started = time.perf_counter()
    with log.open("wb") as output:
        process = subprocess.Popen(command, cwd=folder, env=environment, stdout=output, stderr=subprocess.STDOUT)
    try:
        ready = _seconds_until(log, started, " ready.")
        children = ready
        if "--outbox" in options:
            children = _seconds_until_served(environment, started)
        # The first pass and the first rebalance belong to the start.
        time.sleep(3)
        tree = _tree(process.pid)
        before = _cpu(tree), _statements(environment)
        time.sleep(IDLE_SECONDS)
        after = _cpu(tree), _statements(environment)
        memory = sum(_pss(pid) for pid in tree)
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait()
    return (
        ready,
        children,
        len(tree),
        memory,
        (after[0] - before[0]) * 1000 / IDLE_SECONDS,
        (after[1] - before[1]) / IDLE_SECONDS,
    )


def _seconds_until(log: Path, started: float, text: str) -> float:
    while text not in log.read_text():
        if time.perf_counter() - started > 60:
            raise SystemExit(f"no {text!r} within 60 s:\n{log.read_text()}")
        time.sleep(0.02)
    return time.perf_counter() - started


def _seconds_until_served(environment: dict[str, str], started: float) -> float:
    """Until a broker leads and a consumer has registered."""
    with psycopg.connect(environment["OUTBOX_DATABASE_URL"], autocommit=True) as connection:
        while True:
            row = connection.execute(
                "SELECT EXISTS (SELECT FROM outbox.leader_lease WHERE expires_at > clock_timestamp())"
                " AND EXISTS (SELECT FROM outbox.consumer WHERE expires_at > clock_timestamp())"
            ).fetchone()
            if row == (True,):
                return time.perf_counter() - started
            if time.perf_counter() - started > 60:
                raise SystemExit("nobody leads and consumes within 60 s")
            time.sleep(0.02)


def _tree(pid: int) -> list[int]:
    """A process and all that descend from it."""
    found = [pid]
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in (task / "children").read_text().split():
            found += _tree(int(child))
    return found


def _pss(pid: int) -> float:
    [line] = [line for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines() if line.startswith("Pss:")]
    return int(line.split()[1]) / 1024


def _cpu(tree: list[int]) -> float:
    """Seconds of all processes, in user and kernel mode."""
    fields = [Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split() for pid in tree]
    return sum(int(field[11]) + int(field[12]) for field in fields) / _TICKS


def _statements(environment: dict[str, str]) -> int:
    """Transactions on both databases; in autocommit, a statement is one."""
    total = 0
    for name in ("DATABASE_URL", "OUTBOX_DATABASE_URL"):
        with psycopg.connect(environment[name], autocommit=True) as connection:
            row = connection.execute(
                "SELECT xact_commit + xact_rollback FROM pg_stat_database WHERE datname = current_database()"
            ).fetchone()
            assert row is not None
            total += row[0]
    return total


if __name__ == "__main__":
    main()
