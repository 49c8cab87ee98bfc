"""The history of findings over the runs: two Parquet tables in the output folder, each with one file per day.

    history/counts/day=2025-06-01/counts.parquet        per run: the number of keys of each class
    history/findings/day=2025-06-01/findings.parquet    per run: findings that are new, changed their class, or ended

A run adds its rows to the tables after its result is in force. If the run is killed before it adds its rows, the next
run adds these rows. The rows contain the name of their run, so no run's rows are written twice. The day in a path is
the UTC day of the run's `finished_at`.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import date, datetime, timedelta
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from ..common.store import Store
from ..rules.rule import CLOSED, FAULTS, FindingClass
from . import summary

COUNTS: Final = "counts"
FINDINGS: Final = "findings"
REPORTED_DAYS: Final = 60
_WHOLE_DAYS: Final = 2
_MOMENT: Final = pa.timestamp("us", tz="UTC")
_TEXT: Final = pa.string()
_HEAD: Final = [("run", _TEXT), ("finished_at", _MOMENT)]
SCHEMAS: Final = {
    COUNTS: pa.schema([*_HEAD, *((name, _TEXT) for name in ("mode", "rule", "group", "class")), ("count", pa.int64())]),
    FINDINGS: pa.schema(
        [
            *_HEAD,
            *((name, _TEXT) for name in ("event", "rule", "key", "group", "class", "was", "severity")),
            ("first_seen", _MOMENT),
        ]
    ),
}
# The classes whose counts are recorded even if they are 0, so that the table also has rows of a run without findings.
_ALWAYS: Final = (FindingClass.OK.value, FindingClass.PENDING.value)


def of_result(store: Store, result: Mapping[str, Any]) -> dict[str, pa.Table]:
    """The rows of one run for each table, from its result and the findings that the result names."""
    finished = datetime.fromisoformat(result["finished_at"])
    head = {"run": result["run"], "finished_at": finished}
    counts = [
        {**head, "mode": result["mode"], "rule": rule["name"], "group": group, "class": name, "count": count}
        for rule, group, name, count in summary.counts(result)
        if count or name in _ALWAYS
    ]
    found = store.table(result["findings"], SCHEMAS[FINDINGS].names)
    # The counts are written last: if they exist, `make_up` assumes that the tables have all rows of the run.
    return {
        FINDINGS: _changes(found, result["run"], finished),
        COUNTS: pa.Table.from_pylist(counts, SCHEMAS[COUNTS]),
    }


def _changes(found: pa.Table | None, run: str, finished: datetime) -> pa.Table:
    """The findings of a run that are new, changed their class, or ended."""
    schema = SCHEMAS[FINDINGS]
    if found is None:
        return schema.empty_table()
    name, was = found["class"], found["was"]
    is_closed = pc.is_in(name, pa.array(CLOSED))
    is_new = pc.is_null(was)
    found = found.append_column("event", pc.if_else(is_closed, name, pc.if_else(is_new, "FOUND", "CHANGED")))
    differs = pc.or_kleene(is_new, pc.not_equal(name, was))
    found = found.filter(pc.and_(differs, pc.invert(pc.and_(is_closed, is_new))))
    same = {"run": run, "finished_at": finished}
    columns = [
        pa.array([same[field.name]] * len(found), field.type)
        if field.name in same
        else found[field.name].cast(field.type)
        for field in schema
    ]
    return pa.Table.from_arrays(columns, schema=schema)


def keep(store: Store, entries: Mapping[str, pa.Table]) -> None:
    """Add the rows of one run to the tables, unless the tables have rows of this run. Raises OSError."""
    for name, table in entries.items():
        if not len(table):
            continue
        day = table["finished_at"][0].as_py().date()
        path = _path(name, day)
        known = store.table(path, table.column_names)
        if known is not None and table["run"][0].as_py() in known["run"].unique().to_pylist():
            continue
        store.write_table(path, table if known is None else pa.concat_tables([known, table]))


def make_up(store: Store, result: Mapping[str, Any]) -> None:
    """If the run of the result in force was killed before it added its rows to the tables, add these rows now. Raises
    OSError."""
    known = store.table(_path(COUNTS, datetime.fromisoformat(result["finished_at"]).date()), ["run"])
    if known is None or result["run"] not in known["run"].unique().to_pylist():
        keep(store, of_result(store, result))


def until(store: Store, last: date) -> pa.Table:
    """The counts of the REPORTED_DAYS days up to `last`.

    Of a day at least _WHOLE_DAYS days before `last`, the result has only the counts of the day's last run.
    """
    first = (last - timedelta(days=REPORTED_DAYS)).isoformat()
    whole = (last - timedelta(days=_WHOLE_DAYS)).isoformat()
    read = [SCHEMAS[COUNTS].empty_table()]
    for day in store.folders(f"history/{COUNTS}"):
        if not f"day={first}" < day <= f"day={last.isoformat()}":
            continue
        table = store.table(f"history/{COUNTS}/{day}/{COUNTS}.parquet", SCHEMAS[COUNTS].names)
        if table is not None and day <= f"day={whole}":
            table = table.filter(pc.equal(table["finished_at"], pc.max(table["finished_at"])))
        read += [] if table is None else [table]
    return pa.concat_tables(read)


def runs(counts: pa.Table) -> list[tuple[float, dict[str, int]]]:
    """The end of each run (in seconds since 1970) and its open findings by class, in the order of time."""
    found: dict[str, tuple[float, dict[str, int]]] = {}
    for row in counts.to_pylist():
        by_class = found.setdefault(row["run"], (row["finished_at"].timestamp(), {}))[1]
        if row["class"] in FAULTS:
            by_class[row["class"]] = by_class.get(row["class"], 0) + row["count"]
    return sorted(found.values(), key=lambda each: each[0])


def _path(name: str, day: date) -> str:
    return f"history/{name}/day={day.isoformat()}/{name}.parquet"
