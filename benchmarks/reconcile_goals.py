"""The goals of reconciliation's speed, each with what it is measured against in the same round.

    OUTBOX_BENCH_STORE=1 python -m benchmarks.reconcile_goals [--pairs 10000000] [--small 500000] [--repeats 1]

Jobs of half a million pairs (`--small`) show the time of starting and compiling. Jobs of ten million (`--pairs`) show
the time per pair. With the defaults the script takes some ten minutes on two quiet cores, and 15 GB of disk. With
OUTBOX_BENCH_STORE=1 it stores the table, and `make tables` prints it into docs/maintainers/figures.md.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks import harness
from benchmarks.reconcile_data import FINDING_EVERY, RULES, fill_postgres, with_findings, write_parquet

JOB = (sys.executable, "-m", "benchmarks.reconcile_jobs")
POLL_SECONDS = 0.2
THREE_RULES = 3
Seconds = Callable[[str], list[float]]
"""The seconds of a job in each round, by its name."""


@dataclass(frozen=True)
class Goal:
    """A row of the table. `value` computes the figure of each round from the seconds of the jobs `of` and `beside`."""

    what: str
    of: str
    limit: float
    beside: str = ""
    times: int = 1
    """How many of the job `beside` do the same work as the job `of`."""

    def values(self, seconds: Seconds) -> list[float]:
        if not self.beside:
            return seconds(self.of)
        return [one / (self.times * other) for one, other in zip(seconds(self.of), seconds(self.beside), strict=True)]

    def cells(self, seconds: Seconds) -> list[str]:
        found, unit = harness.Spread.of(self.values(seconds)), "" if self.beside else " s"
        return [
            self.what,
            f"≤ {self.limit:g}{unit}",
            f"{found:.2f}{unit}",
            "yes" if found.median <= self.limit else "no",
        ]


LARGE = (
    Goal("run from two PostgreSQL databases, checksums are equal", "checksum", 20),
    Goal("the same, against COPY of both tables to /dev/null", "checksum", 1.25, "copy"),
    Goal("second run, a hundredth of the buckets is new, against the first", "second", 0.05, "checksum"),
    Goal("run from Parquet, against a plain join", "parquet", 1.15, "join"),
    Goal(f"run with a finding per {FINDING_EVERY:,} pairs, against a run without", "findings", 1.5, "parquet"),
)
SMALL = (
    Goal("whole command from two PostgreSQL databases, checksums are equal", "command-checksum", 12),
    Goal("whole command from Parquet", "command-parquet", 12),
    Goal(
        f"whole command with {THREE_RULES} rules, against {THREE_RULES} commands",
        "command-three",
        1,
        "command-parquet",
        3,
    ),
    Goal("all messages have one key, against a key each", "hot", 1.3, "even"),
)
JOBS = {
    "parquet": "whole run, from Parquet",
    "join": "plain full outer join and compare, from Parquet",
    "hot": "scan of one key with all messages, from Parquet",
    "checksum": "whole run, two PostgreSQL databases, clean day, checksums",
    "copy": "floor: PostgreSQL's COPY of both to /dev/null, a connection each",
    "command-checksum": "whole command, two PostgreSQL databases, checksums are equal",
    "command-parquet": "whole command, from Parquet",
    "command-three": f"whole command with {THREE_RULES} rules, from Parquet",
    "even": "scan of a key per message, from Parquet",
    "second": "second run, two PostgreSQL databases, a hundredth of the buckets is new, look back of one bucket",
    "findings": "whole run, from Parquet, with findings",
}
# What a whole command is compared with: the least programs that start Spark.
BESIDE = {
    "program-nothing": "program by hand: starts Spark, runs a job over one row, ends",
    "program-join": "program by hand: starts Spark, joins the same Parquet files, ends",
}


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=10_000_000, help="0: leave these goals out (default: %(default)s)")
    parser.add_argument("--small", type=int, default=500_000, help="0: leave these goals out (default: %(default)s)")
    parser.add_argument("--master", default="local[2]")
    parser.add_argument("--repeats", type=int, default=1)
    given = parser.parse_args()
    for rows, goals in ((given.small, SMALL), (given.pairs, LARGE)):
        if rows:
            beside = BESIDE if goals is SMALL else {}
            jobs = measured(rows, goals, given.master, given.repeats, beside)
            print_all(f"{rows:,} pairs, {given.master}, {given.repeats} rounds", rows, goals, jobs)


def measured(
    rows: int, goals: tuple[Goal, ...], master: str, repeats: int, beside: Mapping[str, str]
) -> dict[str, Measured]:
    """Prepare the data, and run all jobs in rounds, so that what changes on the machine meets all of them.

    `beside` has the titles of further jobs, which no goal names.
    """
    titles = {name: JOBS[name] for goal in goals for name in (goal.of, goal.beside) if name}
    titles |= beside
    with tempfile.TemporaryDirectory(prefix="outbox-bench-") as name, harness.server() as url:
        folder = Path(name)
        prepare_parquet(folder, rows, master)
        prepare_postgres(folder, url, rows)
        three_rules(folder)
        (folder / "findings.toml").write_text(with_findings((folder / "parquet.toml").read_text()))
        jobs = {name: Measured(title, [*JOB, name, str(folder), str(rows), master]) for name, title in titles.items()}
        for number in range(repeats):
            for each in jobs.values():
                each.run()
                print(f"  (round {number + 1}: {each.title}: {each.seconds[-1]} s)", flush=True)
    return jobs


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
    text = RULES.format(app='env = "BENCH_APP"', broker='env = "BENCH_BROKER"', extra='bucket = "1h"\nlook_back = "1h"')
    (folder / "checksum.toml").write_text(text)


def three_rules(folder: Path) -> None:
    """Write the rules of Parquet with three rules of the same tables."""
    text = (folder / "parquet.toml").read_text()
    head, rule = text.split("[[rule]]\n")
    rules = [rule.replace('name = "orders"', f'name = "orders {number}"') for number in range(THREE_RULES)]
    (folder / "three.toml").write_text("[[rule]]\n".join([head, *rules]))


def print_all(title: str, rows: int, goals: tuple[Goal, ...], jobs: Mapping[str, Measured]) -> None:
    """The table of the goals, and the table of the jobs behind them."""

    def seconds(name: str) -> list[float]:
        return [each for each in jobs[name].seconds if each is not None]

    harness.table(
        f"Goals: {title}", ("what", "goal", "median (lowest to highest)", "met?"), [g.cells(seconds) for g in goals]
    )
    heads = ("job", "seconds", "pairs/s", "GiB at most")
    harness.table(f"Jobs: {title}", heads, [each.row(rows) for each in jobs.values()])


if __name__ == "__main__":
    main()
