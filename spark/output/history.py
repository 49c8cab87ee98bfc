"""The history of findings over the runs: two Parquet tables in the output folder, each with one file per day.

    history/counts/day=2025-06-01/counts.parquet        per run: the number of keys of each class
    history/findings/day=2025-06-01/findings.parquet    per run: findings that are new, changed their class, or ended

A run adds its rows to the tables after its result is in force. If the run is killed before it adds its rows, the next
run adds these rows. The rows contain the name of their run, so no run's rows are written twice. The day in a path is
the UTC day of the run's `finished_at`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date, datetime, timedelta
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from ..common.store import Store
from ..rules.rule import FAULTS, FindingClass

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
_FAULTS: Final = [name.value for name in FAULTS]
_CLOSED: Final = [FindingClass.RECOVERED.value, FindingClass.EXPIRED.value]
# The classes whose counts are recorded even if they are 0, so that the table also has rows of a run without findings.
_ALWAYS: Final = (FindingClass.OK.value, FindingClass.PENDING.value)


@dataclass(frozen=True, slots=True)
class Entries:
    """Rows of the tables `counts` and `findings`."""

    counts: pa.Table
    findings: pa.Table

    def and_then(self, later: Entries) -> Entries:
        """The rows of these entries, followed by the rows of `later`."""
        return Entries(pa.concat_tables([self.counts, later.counts]), pa.concat_tables([self.findings, later.findings]))


def of_result(store: Store, result: Mapping[str, Any]) -> Entries:
    """The rows of one run, from its result and the findings that the result names."""
    finished = datetime.fromisoformat(result["finished_at"])
    head = {"run": result["run"], "finished_at": finished}
    counts = [
        {**head, "mode": result["mode"], "rule": rule["name"], "group": group, "class": name, "count": count}
        for rule in result["rules"]
        for group, counted in {"": rule["counts"], **rule["groups"]}.items()
        for name, count in counted.items()
        if count or name in _ALWAYS
    ]
    found = store.table(result["findings"], SCHEMAS[FINDINGS].names)
    return Entries(pa.Table.from_pylist(counts, SCHEMAS[COUNTS]), _changes(found, result["run"], finished))


def _changes(found: pa.Table | None, run: str, finished: datetime) -> pa.Table:
    """The findings of a run that are new, changed their class, or ended."""
    schema = SCHEMAS[FINDINGS]
    if found is None:
        return schema.empty_table()
    name, was = found["class"], found["was"]
    is_closed = pc.is_in(name, pa.array(_CLOSED))
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


def keep(store: Store, entries: Entries) -> None:
    """Add the rows of one run to the tables, unless the tables have rows of this run. Raises OSError."""
    # Write the counts last: if the counts exist, `make_up` assumes that the tables have all rows of the run.
    for name, table in ((FINDINGS, entries.findings), (COUNTS, entries.counts)):
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


def until(store: Store, last: date) -> Entries:
    """The rows of the REPORTED_DAYS days up to `last`.

    For a day at least _WHOLE_DAYS days before `last`, the function returns only the counts of the last run of that day.
    """
    first = (last - timedelta(days=REPORTED_DAYS)).isoformat()
    whole = (last - timedelta(days=_WHOLE_DAYS)).isoformat()
    read = {}
    for name, schema in SCHEMAS.items():
        read[name] = schema.empty_table()
        for day in store.folders(f"history/{name}"):
            if not f"day={first}" < day <= f"day={last.isoformat()}":
                continue
            table = store.table(f"history/{name}/{day}/{name}.parquet", schema.names)
            if table is None:
                continue
            if name == COUNTS and day <= f"day={whole}":
                table = table.filter(pc.equal(table["finished_at"], pc.max(table["finished_at"])))
            read[name] = pa.concat_tables([read[name], table])
    return Entries(read[COUNTS], read[FINDINGS])


def _path(name: str, day: date) -> str:
    return f"history/{name}/day={day.isoformat()}/{name}.parquet"


@dataclass(frozen=True, slots=True)
class Day:
    """One day: the findings that were open after the last run of the day, and the numbers of findings that were found
    or ended on that day."""

    day: date
    open: Mapping[str, int]
    found: int
    recovered: int
    expired: int


@dataclass(frozen=True, slots=True)
class Trend:
    """The history for the report: the open findings by class after each run, the numbers of each day, and the findings
    that ended last."""

    runs: Sequence[tuple[float, Mapping[str, int]]]
    days: Sequence[Day]
    ended: Sequence[Mapping[str, Any]]


def trend(entries: Entries, shown_ended: int) -> Trend:
    """The history for the report. The newest day and the last ended finding come first."""
    runs: dict[str, tuple[datetime, dict[str, int]]] = {}
    for row in entries.counts.to_pylist():
        by_class = runs.setdefault(row["run"], (row["finished_at"], {}))[1]
        if row["class"] in _FAULTS:
            by_class[row["class"]] = by_class.get(row["class"], 0) + row["count"]
    events: dict[tuple[date, str], int] = {}
    grouped = entries.findings.group_by(["run", "finished_at", "event"]).aggregate([([], "count_all")])
    for row in grouped.to_pylist():
        place = (row["finished_at"].date(), row["event"])
        events[place] = events.get(place, 0) + row["count_all"]
    by_day: dict[date, list[Mapping[str, int]]] = {}
    ordered = sorted(runs.values(), key=lambda each: each[0])
    for finished, by_class in ordered:
        by_day.setdefault(finished.date(), []).append(by_class)
    days = [
        Day(day, counted[-1], *(events.get((day, event), 0) for event in ("FOUND", *_CLOSED)))
        for day, counted in by_day.items()
    ]
    is_closed = pc.is_in(entries.findings["event"], pa.array(_CLOSED))
    ended = entries.findings.filter(is_closed).sort_by([("finished_at", "descending"), ("key", "ascending")])
    return Trend(
        [(finished.timestamp(), by_class) for finished, by_class in ordered],
        days[::-1],
        ended.slice(0, shown_ended).to_pylist(),
    )
