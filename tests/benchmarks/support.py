"""Running a benchmark small, and reading what it prints."""

from __future__ import annotations

import os
import re
import subprocess
import sys

Row = dict[str, str]


def tables(module: str, *arguments: str, **environment: str) -> dict[str, list[Row]]:
    """The tables that a benchmark prints, by their titles."""
    done = subprocess.run(
        [sys.executable, "-m", f"benchmarks.{module}", *arguments],
        env=os.environ | {"OUTBOX_BENCH_REPEATS": "1"} | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-5000:]
    return read(done.stdout)


def read(output: str) -> dict[str, list[Row]]:
    """A table is a title after an empty line, and indented rows, whose cells are two spaces apart."""
    found: dict[str, list[Row]] = {}
    for part in output.split("\n\n"):
        title, *lines = part.strip("\n").splitlines() or [""]
        cells = [re.split(r" {2,}", line.strip()) for line in lines if line.startswith("  ")]
        if cells:
            found[title] = [dict(zip(cells[0], row, strict=True)) for row in cells[1:]]
    return found


def number(cell: str) -> float:
    """The median of a cell."""
    return float(cell.split(" ")[0].replace(",", ""))
