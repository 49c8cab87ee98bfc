"""How fast pairs are reconciled: whole runs compared with a plain join, datacompy and the least possible times.

    python -m benchmarks.reconcile_run [ROWS] [--master local[2]] [--sources parquet,join] [--repeats 3]

A million rows, the default, take about ten minutes. Every measurement is a process of its own, so that the peak of its
memory (JVM and Python together) is its own; all of a round are run before the next round, so that what changes on the
machine meanwhile meets all of them. datacompy runs in an environment of its own: $DATACOMPY_PYTHON names its Python
(pip install 'datacompy[spark]>=1.1').
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks import harness
from benchmarks.reconcile_data import RULES, fill_postgres, write_parquet

POLL_SECONDS = 0.2
CHILD = "benchmarks.reconcile_jobs"
DATACOMPY = "DATACOMPY_PYTHON"
TITLES = {
    "parquet": "whole run, from Parquet",
    "join": "plain full outer join and compare, from Parquet",
    "datacompy": "datacompy, from Parquet",
    "hot": "scan of one key with all messages, from Parquet",
    "postgres": "whole run, two PostgreSQL databases, everything read",
    "checksum": "whole run, two PostgreSQL databases, clean day, checksums",
    "adbc": "floor: ADBC alone reads both tables, a connection each",
    "copy": "floor: PostgreSQL's COPY of both to /dev/null, a connection each",
}
FROM_PARQUET = {"parquet", "join", "datacompy", "hot"}
COMPARISONS = (
    ("parquet", "join", "the whole run takes, beside the plain join"),
    ("datacompy", "parquet", "datacompy takes, beside the whole run"),
    ("postgres", "adbc", "the whole run from PostgreSQL takes, beside ADBC alone"),
    ("postgres", "copy", "the whole run from PostgreSQL takes, beside COPY"),
)


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


@dataclass
class Measured:
    """The seconds of a job, round by round; None where it failed."""

    title: str
    command: list[str]
    seconds: list[float | None] = field(default_factory=list)
    peaks: list[float] = field(default_factory=list)

    def run(self) -> None:
        """Once more. The jobs print their own seconds, as JSON."""
        with subprocess.Popen(self.command, stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
            peak = Peak(process.pid)
            peak.start()
            out, _ = process.communicate()
        self.peaks.append(peak.finish() / 2**30)
        self.seconds.append(None if process.returncode else float(json.loads(out.splitlines()[-1])["seconds"]))

    def row(self, rows: int) -> list[str]:
        """Title, seconds, pairs per second, memory."""
        done = [each for each in self.seconds if each is not None]
        if len(done) < len(self.seconds):
            return [self.title, f"failed in {len(self.seconds) - len(done)} of {len(self.seconds)} rounds", "", ""]
        seconds = harness.Spread.of(done)
        return [self.title, f"{seconds:.1f}", f"{rows / seconds.median:,.0f}", f"{harness.Spread.of(self.peaks):.1f}"]


def compared(one: Measured, other: Measured) -> str:
    """How many times as long the one takes, round by round."""
    pairs = [(a, b) for a, b in zip(one.seconds, other.seconds, strict=True) if a is not None and b is not None]
    return f"{harness.Spread.of([a / b for a, b in pairs]):.2f}" if pairs else "not measured"


def job(name: str, folder: Path, rows: int, master: str) -> list[str]:
    if name == "datacompy":
        return [os.environ[DATACOMPY], str(Path(__file__).with_name("reconcile_datacompy.py")), str(folder), master]
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
    for name, extra in (("postgres", ""), ("checksum", 'bucket = "1h"\nlook_back = "1h"')):
        text = RULES.format(app='env = "BENCH_APP"', broker='env = "BENCH_BROKER"', extra=extra)
        (folder / f"{name}.toml").write_text(text)


def main() -> None:
    """Prepare the data, run the jobs in rounds, print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", type=int, nargs="?", default=1_000_000)
    parser.add_argument("--master", default="local[2]")
    parser.add_argument("--sources", default=",".join(TITLES), help="(default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=3)
    given = parser.parse_args()
    wanted = given.sources.split(",")
    if unknown := set(wanted) - set(TITLES):
        parser.error(f"no source {', '.join(sorted(unknown))}; there are: {', '.join(TITLES)}")
    if "datacompy" in wanted and not os.environ.get(DATACOMPY):
        print(f"datacompy: not measured; set {DATACOMPY} to the Python of an environment that has datacompy[spark]")
        wanted.remove("datacompy")
    with tempfile.TemporaryDirectory(prefix="outbox-bench-") as name, contextlib.ExitStack() as held:
        folder = Path(name)
        prepare(folder, given, wanted, held)
        jobs = {name: Measured(TITLES[name], job(name, folder, given.rows, given.master)) for name in wanted}
        for number in range(given.repeats):
            for each in jobs.values():
                each.run()
                print(f"  (round {number + 1}: {each.title}: {each.seconds[-1]} s)", flush=True)
    print_all(jobs, given)


def prepare(folder: Path, given: argparse.Namespace, wanted: Sequence[str], held: contextlib.ExitStack) -> None:
    """The data that is wanted, and a server if it takes one."""
    started = time.perf_counter()
    if FROM_PARQUET & set(wanted):
        prepare_parquet(folder, given.rows, given.master)
    if set(wanted) - FROM_PARQUET:
        prepare_postgres(folder, held.enter_context(harness.server()), given.rows)
    print(f"  (data written in {time.perf_counter() - started:.0f} s)", flush=True)


def print_all(jobs: Mapping[str, Measured], given: argparse.Namespace) -> None:
    """The table, and the comparisons that are goals."""
    title = f"{given.rows:,} orders against {given.rows:,} messages, {given.master}, {given.repeats} rounds"
    heads = ("", "seconds after Spark's start", "pairs/s", "GiB at most")
    harness.table(f"{title}: median (smallest to largest)", heads, [each.row(given.rows) for each in jobs.values()])
    for one, other, text in COMPARISONS:
        if one in jobs and other in jobs:
            print(f"  {text}: {compared(jobs[one], jobs[other])} times as long")


if __name__ == "__main__":
    main()
