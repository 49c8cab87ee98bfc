"""The measured figures as JSON files in benchmarks/results; `python -m benchmarks.tables` prints them into documents.

A file is `NAME.json`, or `NAME_slowed.json` for a slowed machine. It has `about` (machine, commit, date, rounds, sizes)
and one of these:

- `rows`: by row and column, the median, the lowest and the highest value, and the values of all rounds
- `tables`: the tables that a script has printed, each with `title`, `header` and `rows` of texts

OUTBOX_BENCH_RESULTS is another folder in place of benchmarks/results.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks import slowed

FOLDER = Path(os.environ.get("OUTBOX_BENCH_RESULTS") or Path(__file__).resolve().parent / "results")
DURABILITY = "fsync on, synchronous_commit on"
# One round: the values by row and column.
Round = Mapping[str, Mapping[str, float]]


@dataclass(frozen=True)
class Results:
    """The content of one file. `rows` has the values of all rounds by row and column."""

    about: dict[str, Any]
    rows: dict[str, dict[str, list[float]]]
    tables: list[dict[str, Any]]


def store_rounds(name: str, rounds: Sequence[Round], *, raw_notify: float, n: Mapping[str, float]) -> None:
    """Replace the file by the figures of all rounds until now; the sizes `n` by their names."""
    rows = {
        row: {column: _figure([one[row][column] for one in rounds]) for column in columns}
        for row, columns in rounds[0].items()
    }
    _write(name, {"about": about(len(rounds), raw_notify, n), "rows": rows})


def store_tables(name: str, tables: Sequence[Mapping[str, Any]], *, rounds: int, durability: str = DURABILITY) -> None:
    """Replace the file by the tables that a script has printed until now. `rounds` 0 is unknown."""
    raw_notify = float(os.environ.get("OUTBOX_BENCH_RAW_NOTIFY", "0"))
    given = {key: value for key, value in sorted(os.environ.items()) if key.startswith("OUTBOX_BENCH_")}
    own = (*(f"OUTBOX_BENCH_{name}" for name in ("STORE", "RAW_NOTIFY", "RESULTS", "REPEATS")), slowed.VARIABLE)
    sizes = {key: value for key, value in given.items() if key not in own}
    said = about(rounds, raw_notify, sizes) | {"durability": durability}
    _write(name, {"about": said, "tables": list(tables)})


def load(name: str, *, slowed_machine: bool = False) -> Results | None:
    """The stored figures; None if the script has stored none."""
    path = _path(name, slowed_machine=slowed_machine)
    if not path.exists():
        return None
    found = json.loads(path.read_text(encoding="utf-8"))
    rows = {
        row: {column: figure["rounds"] for column, figure in columns.items()}
        for row, columns in found.get("rows", {}).items()
    }
    return Results(found["about"], rows, found.get("tables", []))


def about(rounds: int, raw_notify: float, n: Mapping[str, Any]) -> dict[str, Any]:
    """The machine, the version and the size of a measurement. `raw_notify` is in messages/s; 0 is unknown."""
    return {
        "commit": _commit(),
        "date": f"{datetime.now(UTC):%Y-%m-%d}",
        "rounds": rounds,
        "n": dict(n),
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "python": platform.python_version(),
        "durability": DURABILITY,
        "raw_notify_per_second": round(raw_notify),
        "slowed": slowed.HOW if slowed.wanted() else "",
    }


def _path(name: str, *, slowed_machine: bool) -> Path:
    return FOLDER / f"{name}{'_slowed' if slowed_machine else ''}.json"


def _write(name: str, content: Mapping[str, Any]) -> None:
    """Write beside the file first: an interruption leaves the earlier file or the new one."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    path = _path(name, slowed_machine=slowed.wanted())
    part = path.with_suffix(".part")
    part.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    part.replace(path)


def _figure(values: Sequence[float]) -> dict[str, Any]:
    rounds = [float(f"{value:.5g}") for value in values]
    return {"median": statistics.median(rounds), "lowest": min(rounds), "highest": max(rounds), "rounds": rounds}


def _commit() -> str:
    """The short id of the commit, with a plus if the checkout has changes."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(Path(__file__).parent), *arguments]
        return subprocess.run(command, check=False, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True).stdout

    changed = git("status", "--porcelain", "--untracked-files=no", "--", ":/", ":!/benchmarks/results", ":!/docs")
    return git("rev-parse", "--short", "HEAD").strip() + ("+" if changed.strip() else "")


def _cpu() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
