"""The report: one HTML file that needs nothing else. Every value from the data is escaped where it is written."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from datetime import datetime
from html import escape
from importlib import resources
from itertools import pairwise
from typing import Any, Final

from pyspark.sql import DataFrame, Window
from pyspark.sql import functions as F

from ..comparison import classify
from ..comparison.classify import FindingClass
from ..sources.base import DataSource, TableSelection
from . import history, report_findings, report_history
from .remedies import REMEDIES
from .report_plot import BINS, Times, plot

Volume = list[tuple[datetime, int]]
SHOWN_TIMES: Final = ("at", "row_at", "message_at", "settled_at", "effect_at", "first_seen")
_COARSE_SECONDS: Final = 3600
_FINEST_SECONDS: Final = 1
# Rows are counted again for a picture that many times as fine.
_WORTH_IT: Final = 4


def volume(
    source: DataSource,
    selection: TableSelection,
    since: datetime | None,
    span_seconds: float | None = None,
    known: tuple[int, Volume] | None = None,
) -> Volume:
    """Rows per bucket of time: hours, or finer down to a second, while the plot has room for it.

    They are counted once where it is known how much time they span, and not at all where buckets are `known` (their
    seconds, and what is in them) that are fine enough.
    """
    guess = _COARSE_SECONDS if span_seconds is None else max(_FINEST_SECONDS, math.ceil(span_seconds / BINS))
    seconds = min(guess, _COARSE_SECONDS)
    seconds, counted = known or (seconds, source.volume(selection, since, seconds))
    while counted:
        span = (counted[-1][0] - counted[0][0]).total_seconds() + seconds
        fine = math.ceil(span / BINS)
        if fine * _WORTH_IT > seconds:
            break
        seconds, counted = fine, source.volume(selection, since, fine)
    return counted


def bucket_seconds(volumes: Sequence[Sequence[tuple[datetime, int]]]) -> int:
    """The finest bucket in which rows were counted, so that findings are counted alike."""
    steps = [(later - sooner).total_seconds() for counted in volumes for (sooner, _), (later, _) in pairwise(counted)]
    return max(1, int(min(steps, default=_FINEST_SECONDS)))


def samples(findings: DataFrame, per_class: int) -> list[dict[str, Any]]:
    """The oldest findings of each rule, class and group; times as ISO 8601 texts."""
    order = Window.partitionBy("rule", "class", "group").orderBy("at", "key")
    times = {name: F.date_format(name, "yyyy-MM-dd HH:mm:ss") for name in SHOWN_TIMES}
    picked = findings.withColumn("place", F.row_number().over(order)).where(F.col("place") <= per_class)
    # Few rows: sorted here, as Spark would run the query twice to sort them in parallel.
    rows = [row.asDict(recursive=True) for row in picked.withColumns(times).collect()]
    rows.sort(key=lambda row: (row["rule"], row["class"], row["group"], row.pop("place")))
    return rows


def render(
    result: Mapping[str, Any],
    found: Sequence[Mapping[str, Any]],
    times: Times,
    volumes: Mapping[str, list[tuple[datetime, int]]],
    trend: history.Trend,
    trace: str,
) -> str:
    """The page."""
    parts = [
        _head(result),
        _tiles(result),
        _counts(result),
        plot([(moment.timestamp(), count) for listed in volumes.values() for moment, count in listed], times),
        report_history.section(trend),
        report_findings.section(result, found, trace),
        _boundary(result),
        _reading_guide(),
    ]
    style = resources.files(__package__).joinpath("report.css").read_text("utf-8")
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">"
        f"<title>{escape(_title(result))}</title><style>{style}</style></head>\n"
        f"<body><main>{''.join(parts)}</main></body></html>\n"
    )


def _title(result: Mapping[str, Any]) -> str:
    state = "clean" if result["status"] == "clean" else f"{result['faults']} findings"
    return f"{result['title']}: {state}"


def _head(result: Mapping[str, Any]) -> str:
    faults = result["faults"]
    noun = "finding" if faults == 1 else "findings"
    badge = ('<b class="badge ok">clean</b>') if not faults else f'<b class="badge bad">{faults:,} {noun}</b>'
    windows = sorted({_window_text(rule) for rule in result["rules"]})
    return (
        f"<header><h1>{escape(result['title'])} {badge}</h1>"
        f"<p>{'<br>'.join(windows)}</p>"
        f'<p class="dim">Run {escape(result["run"])} ({escape(result["mode"])}), finished '
        f"{_moment(result['finished_at'])}. All times are UTC.</p></header>"
    )


def _window_text(rule: Mapping[str, Any]) -> str:
    since = "all rows" if rule["since"] is None else f"rows from {_moment(rule['since'])}"
    return (
        f"Judged: {since} up to <b>{_moment(rule['until'])}</b> "
        f"(both sides complete up to {_moment(rule['watermark'])}, grace {rule['grace_seconds']:g} s)."
        + _look_back_text(rule)
        + (f" Retention: nothing before {_moment(rule['floor'])} can be judged." if rule["floor"] else "")
    )


def _look_back_text(rule: Mapping[str, Any]) -> str:
    """How far changes to what an earlier run has judged are seen."""
    last = rule.get("looked_back")
    if rule["since"] is None:
        return ""
    if last is None:
        return (
            " Changes to rows, messages and effects of a time before that are not seen: no run has looked back (set "
            "look_back in the rule)."
        )
    since = "the beginning" if last["from"] is None else _moment(last["from"])
    return (
        f" Changes to rows, messages and effects of a time before that are seen by a look back: the last, at "
        f"<b>{_moment(last['at'])}</b>, reached back to <b>{since}</b>."
    )


def _tiles(result: Mapping[str, Any]) -> str:
    totals = result["totals"]
    judged = sum(rule["counts"]["OK"] for rule in result["rules"])
    tiles = [
        ("keys as declared", judged, ""),
        ("findings", result["faults"], "bad" if result["faults"] else "ok"),
        ("of them new", result["new_faults"], "bad" if result["new_faults"] else ""),
        *([("acknowledged", result["acknowledged"], "")] if result["acknowledged"] else []),
        ("pending", totals["PENDING"], ""),
        ("recovered", totals["RECOVERED"], ""),
        *([("expired", totals["EXPIRED"], "bad")] if totals["EXPIRED"] else []),
        ("rows read", sum(rule["rows_read"] for rule in result["rules"]), ""),
        ("messages read", sum(rule["messages_read"] for rule in result["rules"]), ""),
    ]
    cells = "".join(f'<div class="tile {css}"><b>{count:,}</b><span>{text}</span></div>' for text, count, css in tiles)
    return f'<section class="tiles">{cells}</section>'


def _counts(result: Mapping[str, Any]) -> str:
    shown = [name for name in classify.CLASSES if name in _ALWAYS or result["totals"][name.value]]
    head = "".join(f"<th class='n'>{name.value}</th>" for name in shown)
    rows = []
    for rule in result["rules"]:
        for place, (group, counts) in enumerate([("", rule["counts"]), *rule["groups"].items()]):
            path = f"{escape(rule['table'])} → {escape(rule['topic'])}"
            label = f"<b>{escape(rule['name'])}</b> <span class='dim'>{path}</span>"
            cells = "".join(_count_cell(name, counts[name.value]) for name in shown)
            name = "message" if not place else f"group {escape(group)}"
            rows.append(f"<tr><td>{label if not place else ''}</td><td>{name}</td>{cells}</tr>")
    return (
        "<section><h2>Counts per class</h2><div class='wide'><table><thead><tr><th>Rule</th><th>Judged</th>"
        f"{head}</tr></thead><tbody>{''.join(rows)}</tbody></table></div></section>"
    )


_ALWAYS: Final = (
    FindingClass.LOST,
    FindingClass.ORPHAN,
    FindingClass.UNDELIVERED,
    FindingClass.MISMATCH,
    FindingClass.PENDING,
    FindingClass.OK,
)


def _count_cell(name: FindingClass, count: int) -> str:
    css = "n zero" if not count else ("n fault" if name in classify.FAULTS else "n")
    return f"<td class='{css}'>{count:,}</td>"


def _boundary(result: Mapping[str, Any]) -> str:
    rows = []
    for title, readings in (("first look", result["snapshots"]), ("second look", result["confirmed_by_snapshots"])):
        for reading in readings:
            cells = (
                title,
                reading["database"],
                reading["identity"],
                _moment(reading["taken_at"]),
                _moment(reading["watermark"]) if reading["watermark"] else "–",
                reading["snapshot"] or "–",
                "; ".join(reading["notes"]) or "–",
            )
            rows.append("<tr>" + "".join(f"<td>{escape(str(cell))}</td>" for cell in cells) + "</tr>")
    notes = [
        f"<li><b>{escape(rule['name'])}</b>: {escape(note)}</li>" for rule in result["rules"] for note in rule["notes"]
    ]
    listed = f"<ul>{''.join(notes)}</ul>" if notes else ""
    return (
        "<section><h2>What was compared</h2><div class='wide'><table><thead><tr><th>Look</th><th>Database</th>"
        "<th>Identity</th><th>Snapshot taken</th><th>Complete up to</th><th>Snapshot</th><th>Notes</th></tr></thead>"
        f"<tbody>{''.join(rows)}</tbody></table></div>{listed}</section>"
    )


def _reading_guide() -> str:
    items = "".join(
        f"<li><i class='mark c-{name.value}'></i><b>{name.value}</b> {escape(REMEDIES[name].meaning)}</li>"
        for name in classify.FAULTS
    )
    return (
        "<section><h2>How to read the classes</h2><p class='dim'>A key can be several at once; it is counted under the "
        "first that holds, in this order. The others are named beside it.</p>"
        f"<ol class='guide'>{items}</ol></section>"
    )


def _moment(text: str) -> str:
    return f"{datetime.fromisoformat(text):%Y-%m-%d %H:%M:%S}"
