"""What a look back by checksums costs, beside an incremental run without one: seconds per million rows.

    python -m benchmarks.reconcile_look_back [ROWS] [--master local[2]] [--repeats 3]

Two PostgreSQL databases have ROWS pairs, all judged by a first run. Each round runs an incremental run, a look back
over all rows of which none has changed, and look backs after one row and ten rows have changed.
"""

from __future__ import annotations

import argparse
import io
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import psycopg

from benchmarks import harness
from benchmarks.reconcile_data import RULES, fill_postgres
from spark import pipeline, session
from spark.common.options import RunOptions
from spark.common.progress import Progress

WHOLE = 30 * 365 * 86_400.0
JOBS = {
    "incremental run, nothing new": None,
    "look back, no row has changed": 0,
    "look back, one row has changed": 1,
    "look back, ten rows of different hours have changed": 10,
}


def one(spark: Any, folder: Path, look_back: float | None) -> tuple[float, dict[str, Any]]:
    """The seconds and the result of a run."""
    options = RunOptions(rules=folder / "rules.toml", output=str(folder / "out"), look_back=look_back)
    started = time.perf_counter()
    result = pipeline.run(spark, options, Progress(io.StringIO()))
    return time.perf_counter() - started, result


def change(app: str, rows: int, count: int) -> None:
    """Change `count` rows that are far from each other."""
    with psycopg.connect(app, autocommit=True) as connection:
        for number in range(count):
            key = rows * (2 * number + 1) // (2 * count)
            connection.execute("UPDATE orders_order SET total = -1 WHERE id = %s", [key])


def restore(app: str) -> None:
    """Take the changes back."""
    with psycopg.connect(app, autocommit=True) as connection:
        connection.execute("UPDATE orders_order SET total = (id % 10000) / 100.0 WHERE total = -1")


def main() -> None:
    """Prepare the data, run the rounds, print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", type=int, nargs="?", default=1_000_000)
    parser.add_argument("--master", default="local[2]")
    parser.add_argument("--repeats", type=int, default=3)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="outbox-bench-") as name, harness.server() as url:
        folder = Path(name)
        app, broker = fill_postgres(url, given.rows)
        os.environ.update(BENCH_APP=app, BENCH_BROKER=broker)
        text = RULES.format(app='env = "BENCH_APP"', broker='env = "BENCH_BROKER"', extra='bucket = "1h"')
        (folder / "rules.toml").write_text(text)
        spark = session.start(given.master)
        one(spark, folder, None)
        seconds: dict[str, list[float]] = {title: [] for title in JOBS}
        for _ in range(given.repeats):
            for title, changed in JOBS.items():
                change(app, given.rows, changed or 0)
                took, result = one(spark, folder, None if changed is None else WHOLE)
                assert result["faults"] == (changed or 0), result["totals"]
                restore(app)
                one(spark, folder, None)
                seconds[title].append(took)
                print(f"  ({title}: {took:.2f} s)", flush=True)
        spark.stop()
    million = given.rows / 1e6
    table = [
        [title, f"{harness.Spread.of(each):.2f}", f"{harness.Spread.of([one / million for one in each]):.2f}"]
        for title, each in seconds.items()
    ]
    harness.table(
        f"{given.rows:,} pairs in {given.rows * 0.05 / 3600:.1f} hours, {given.master}, {given.repeats} rounds",
        ("", "seconds", "seconds per million rows of the look back"),
        table,
    )


if __name__ == "__main__":
    main()
