"""Every kind of fault, in every way to run, from every source: one cell is a chain of runs over one planted world.

`python -m tests.spark.matrix` writes the table of docs/maintainers/reconciliation-matrix.md from the cells that
`test_matrix.py` has stored.
"""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from spark import pipeline
from spark.common.options import RunOptions
from spark.common.progress import Progress
from tests.spark.kinds import KINDS, SPAN, Found
from tests.spark.world import GROUPS, RULES, START, group_rules

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

MODES: Final = ("batch", "incremental", "look back", "archive")
SOURCES: Final = ("postgres", "parquet", "csv", "delta", "iceberg")
# Where the first runs of a chain end.
CUTS: Final = (SPAN / 2, SPAN / 3 * 2)
# Exports are complete up to here. All that is planted is overdue by then.
COMPLETE: Final = START + timedelta(hours=12)
ROOT: Final = Path(__file__).resolve().parents[2]
STORED: Final = ROOT / "var" / "matrix"
PAGE: Final = ROOT / "docs" / "maintainers" / "reconciliation-matrix.md"


@dataclass(kw_only=True)
class Cell:
    """Runs of one cell into one output folder.

    `place` gives the lines of [database.…] that say where a database is, for the clean and for the planted world.
    """

    spark: SparkSession
    folder: Path
    place: Callable[[str, bool], str]
    is_export: bool
    archive: Path | None = None
    """The folder of the archive that a run from PostgreSQL reads beside the log."""
    extra: str = ""
    """A line for the rule."""
    said: io.StringIO = field(default_factory=io.StringIO)

    def path(self, *, planted: bool, watermark: datetime | None) -> Path:
        """The rules file for a state of the world, complete up to `watermark`."""
        text = RULES.format(extra=self.extra, groups=group_rules(GROUPS))
        complete = watermark or (COMPLETE if self.is_export else None)
        given = "" if complete is None else f'\nwatermark = "{complete.isoformat()}"'
        for name in ("APP", "BROKER"):
            place = self.place(name, planted)
            mark = "" if 'kind = "archive"' in place else given
            text = text.replace(f'env = "RECONCILE_{name}"', f"{place}{mark}")
        if 'schema = "outbox"' in text and self.is_export:
            text = text.replace('schema = "outbox"\n', "")
        if self.archive is not None:
            text = text.replace('database = "broker"\n', f'database = "broker"\narchive = "{self.archive}"\n', 1)
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / "reconcile.toml"
        path.write_text(text, encoding="utf-8")
        return path

    def once(self, *, planted: bool = True, watermark: datetime | None = None, **how: Any) -> dict[str, Any]:
        """The result of one run."""
        path = self.path(planted=planted, watermark=watermark)
        options = RunOptions(rules=path, output=str(self.folder / "out"), **how)
        return pipeline.run(self.spark, options, Progress(self.said))

    def found(self, result: Mapping[str, Any]) -> list[Found]:
        """(key, group, class) of a result's findings."""
        rows = self.spark.read.parquet(str(self.folder / "out" / result["findings"])).collect()
        return sorted((row["key"], row["group"], row["class"]) for row in rows)


def judged(cell: Cell, mode: str, plant: Callable[[], None]) -> list[list[Found]]:
    """The findings of each run of a chain; the last one has judged everything. `plant` is called once."""
    if mode == "look back":
        clean = cell.found(cell.once(planted=False))
        plant()
        return [clean, cell.found(cell.once(look_back=30 * 365 * 86_400.0))]
    plant()
    if mode in ("batch", "archive"):
        return [cell.found(cell.once(full=True))]
    return [*(cell.found(cell.once(watermark=START + cut)) for cut in CUTS), cell.found(cell.once())]


def check(chain: list[list[Found]], planted: Mapping[str, list[Found]]) -> None:
    """Raise AssertionError unless the last run has found exactly what was planted, and no earlier one anything else."""
    wanted = sorted(found for each in planted.values() for found in each)
    *earlier, last = chain
    missed = {name: gone for name, each in planted.items() if (gone := [one for one in each if one not in last])}
    false = [one for one in last if one not in wanted]
    assert not missed and not false, f"missed: {missed}; false: {false}"
    assert last == wanted, "each finding once"
    for found in earlier:
        early = [one for one in found if one not in wanted]
        assert not early, f"an earlier run finds something else: {early}"
        assert len(found) < len(wanted), "an earlier run leaves some to the next"


def store(source: str, mode: str, seed: int) -> None:
    """Note that a cell has found every kind."""
    STORED.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"seed": seed, "kinds": [kind.name for kind in KINDS]}, ensure_ascii=False)
    (STORED / f"{source}-{mode.replace(' ', '_')}.json").write_text(text, encoding="utf-8")


def stored() -> dict[tuple[str, str], dict[str, Any]]:
    """The cells that were stored, by source and mode."""
    cells = {}
    for source in SOURCES:
        for mode in MODES:
            path = STORED / f"{source}-{mode.replace(' ', '_')}.json"
            if path.exists():
                cells[source, mode] = json.loads(path.read_text(encoding="utf-8"))
    return cells


def table(cells: Mapping[tuple[str, str], Mapping[str, Any]]) -> str:
    """The two tables of the page: k of k per mode and source, and the modes per kind and source."""
    faults = [kind.name for kind in KINDS if not kind.is_harmless]
    lines = [f"| way to run | {' | '.join(SOURCES)} |", "|---" * (len(SOURCES) + 1) + "|"]
    for mode in MODES:
        counts = []
        for source in SOURCES:
            known = cells.get((source, mode))
            here = 0 if known is None else sum(name in known["kinds"] for name in faults)
            counts.append("not run" if known is None else f"{here} of {len(faults)} (seed {known['seed']})")
        lines.append(f"| {mode} | {' | '.join(counts)} |")
    lines += ["", f"| kind | {' | '.join(SOURCES)} |", "|---" * (len(SOURCES) + 1) + "|"]
    for kind in KINDS:
        found = []
        for source in SOURCES:
            modes = [mode for mode in MODES if kind.name in cells.get((source, mode), {"kinds": ()})["kinds"]]
            missing = [mode for mode in MODES if mode not in modes]
            found.append("all" if not missing else f"all but {', '.join(missing)}" if modes else "not run")
        lines.append(f"| {shown(kind.name)} | {' | '.join(found)} |")
    return "\n".join(lines)


def shown(name: str) -> str:
    """A kind's name in a cell of a table."""
    return re.sub(r"([|<>*_])", r"\\\1", name)


BEGIN, END = "<!-- matrix -->", "<!-- /matrix -->"


def main() -> None:
    """Write the tables into the page."""
    text = PAGE.read_text(encoding="utf-8")
    before, rest = text.split(BEGIN)
    _, after = rest.split(END)
    PAGE.write_text(f"{before}{BEGIN}\n{table(stored())}\n{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
