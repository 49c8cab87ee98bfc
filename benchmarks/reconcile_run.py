"""How fast pairs are reconciled: whole runs beside a plain full-outer-join job and datacompy on the same data.

    python -m benchmarks.reconcile_run [ROWS] [--master local[2]] [--sources parquet,join] [--repeats 3]

Every measurement is a process of its own, so that the peak of its memory (JVM and Python together) is its own.
datacompy runs in an environment of its own: $DATACOMPY_PYTHON names its Python (pip install 'datacompy[spark]>=1.1').
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from benchmarks import harness
from benchmarks.reconcile_data import RULES, fill_postgres, write_parquet

POLL_SECONDS = 0.2
CHILD = "benchmarks.reconcile_jobs"


class Peak(threading.Thread):
    """The largest proportional share of memory (PSS) that a session of processes held together."""

    def __init__(self, session: int) -> None:
        super().__init__(daemon=True)
        self._session, self._stop_asked, self.peak_bytes = session, threading.Event(), 0

    def run(self) -> None:
        while not self._stop_asked.wait(POLL_SECONDS):
            total = sum(self._share(folder) for folder in Path("/proc").glob("[0-9]*"))
            self.peak_bytes = max(self.peak_bytes, total)

    def _share(self, folder: Path) -> int:
        try:
            if int((folder / "stat").read_text().rpartition(")")[2].split()[3]) != self._session:
                return 0
            lines = (folder / "smaps_rollup").read_text().splitlines()
        except (OSError, ValueError):
            return 0  # It ended meanwhile.
        return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))

    def finish(self) -> int:
        """The peak in bytes."""
        self._stop_asked.set()
        self.join()
        return self.peak_bytes


def measure(title: str, rows: int, command: list[str], repeats: int) -> None:
    """Run the job `repeats` times in one process each; print medians. The jobs print their own seconds, as JSON."""
    seconds, peaks = [], []
    for _ in range(repeats):
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
            peak = Peak(process.pid)
            peak.start()
            out, _ = process.communicate()
        peaks.append(peak.finish())
        if process.returncode:
            print(f"  {title:<52} failed (exit code {process.returncode})")
            return
        seconds.append(float(json.loads(out.splitlines()[-1])["seconds"]))
    median = statistics.median(seconds)
    spread = f"{min(seconds):.1f} to {max(seconds):.1f}"
    memory = statistics.median(peaks) / 2**30
    print(f"  {title:<52} {median:>7.1f} s ({spread})  {rows / median:>12,.0f} pairs/s  {memory:>5.1f} GiB", flush=True)


def job(name: str, folder: Path, rows: int, master: str) -> list[str]:
    return [sys.executable, "-m", CHILD, name, str(folder), str(rows), master]


def prepare_parquet(folder: Path, rows: int, master: str) -> None:
    from spark import session

    spark = session.start(master)
    write_parquet(spark, folder, rows)
    spark.stop()
    source = f'kind = "parquet"\npath = "{folder}"\nwatermark = "2030-01-01T00:00:00Z"'
    (folder / "parquet.toml").write_text(RULES.format(app=source, broker=source, extra=""))


def prepare_postgres(folder: Path, url: str, rows: int) -> None:
    app, broker = fill_postgres(url, rows)
    os.environ.update(BENCH_APP=app, BENCH_BROKER=broker)
    for name, extra in (("postgres", ""), ("checksum", 'bucket = "1h"')):
        text = RULES.format(app='env = "BENCH_APP"', broker='env = "BENCH_BROKER"', extra=extra)
        (folder / f"{name}.toml").write_text(text)


def main() -> None:
    """Prepare the data, run the jobs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("rows", type=int, nargs="?", default=1_000_000)
    parser.add_argument("--master", default="local[2]")
    parser.add_argument("--sources", default="parquet,join,hot,datacompy,postgres,checksum")
    parser.add_argument("--repeats", type=int, default=3)
    given = parser.parse_args()
    wanted = given.sources.split(",")
    print(f"{given.rows:,} orders against {given.rows:,} messages, {given.master}, {given.repeats} runs;")
    print("seconds after Spark's start")
    with tempfile.TemporaryDirectory(prefix="outbox-bench-") as name:
        folder = Path(name)
        if {"parquet", "join", "hot", "datacompy"} & set(wanted):
            started = time.perf_counter()
            prepare_parquet(folder, given.rows, given.master)
            print(f"  (Parquet written in {time.perf_counter() - started:.0f} s)")
        titles = {
            "parquet": "outbox_spark, whole run, from Parquet",
            "join": "plain full outer join and compare, from Parquet",
            "hot": "outbox_spark, scan of one key with all messages",
        }
        for source, title in titles.items():
            if source in wanted:
                measure(title, given.rows, job(source, folder, given.rows, given.master), given.repeats)
        if "datacompy" in wanted:
            datacompy(folder, given.rows, given.master, given.repeats)
        if {"postgres", "checksum"} & set(wanted):
            with harness.server() as url:
                prepare_postgres(folder, url, given.rows)
                for source, how in (("postgres", "everything read"), ("checksum", "clean day, checksums")):
                    if source in wanted:
                        title = f"outbox_spark, two PostgreSQL databases, {how}"
                        measure(title, given.rows, job(source, folder, given.rows, given.master), given.repeats)


def datacompy(folder: Path, rows: int, master: str, repeats: int) -> None:
    python = os.environ.get("DATACOMPY_PYTHON")
    if not python:
        print(
            "  datacompy: not measured; set DATACOMPY_PYTHON to the Python of an environment that has datacompy[spark]"
        )
        return
    script = Path(__file__).with_name("reconcile_datacompy.py")
    measure("datacompy, from Parquet", rows, [python, str(script), str(folder), master], repeats)


if __name__ == "__main__":
    main()
