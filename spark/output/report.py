"""The report: one HTML file that needs nothing else. Every value from the data is escaped where it is written."""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping, Sequence
from datetime import datetime
from html import escape
from importlib import resources
from typing import Any, Final

from pyspark.sql import DataFrame, Window
from pyspark.sql import functions as F

from ..comparison import classify
from ..comparison.classify import FindingClass
from ..sources.base import Selection, Source
from .remedies import REMEDIES
from .report_plot import BINS, Times, plot

SHOWN_TIMES: Final = ("at", "row_at", "message_at", "settled_at", "effect_at", "first_seen")
CLOSED: Final = (FindingClass.RECOVERED, FindingClass.EXPIRED)
_COARSE_SECONDS: Final = 3600
_FINE_SECONDS: Final = 10

EXPLAINED: Final = {name: remedy.meaning for name, remedy in REMEDIES.items()}


def volume(source: Source, selection: Selection, since: datetime | None) -> list[tuple[datetime, int]]:
    """Rows per bucket of time: hours, or finer where the plot has room for it."""
    coarse = source.volume(selection, since, _COARSE_SECONDS)
    if not coarse:
        return []
    span = (coarse[-1][0] - coarse[0][0]).total_seconds() + _COARSE_SECONDS
    fine = math.ceil(span / BINS / _FINE_SECONDS) * _FINE_SECONDS
    return coarse if fine >= _COARSE_SECONDS else source.volume(selection, since, fine)


def samples(findings: DataFrame, per_class: int) -> list[dict[str, Any]]:
    """The oldest findings of each rule, class and group; times as ISO 8601 texts."""
    order = Window.partitionBy("rule", "class", "group").orderBy("at", "key")
    times = {name: F.date_format(name, "yyyy-MM-dd HH:mm:ss") for name in SHOWN_TIMES}
    picked = findings.withColumn("place", F.row_number().over(order)).where(F.col("place") <= per_class)
    rows = picked.withColumns(times).orderBy("rule", "class", "group", "place").drop("place").collect()
    return [row.asDict(recursive=True) for row in rows]


def finding_counts(findings: DataFrame) -> list[tuple[str, str, str, float | None, int]]:
    """Findings per rule, group, class and bucket of time (its start in seconds since 1970)."""
    bucket = (F.floor(F.unix_seconds("at") / _FINE_SECONDS) * _FINE_SECONDS).cast("bigint")
    rows = findings.groupBy("rule", "group", "class", bucket.alias("bucket")).count().collect()
    return [
        (row["rule"], row["group"], row["class"], None if row["bucket"] is None else float(row["bucket"]), row["count"])
        for row in rows
    ]


def render(
    result: Mapping[str, Any],
    found: Sequence[Mapping[str, Any]],
    times: Times,
    volumes: Mapping[str, list[tuple[datetime, int]]],
    trace: str,
) -> str:
    """The page."""
    parts = [
        _head(result),
        _tiles(result),
        _counts(result),
        plot([(moment.timestamp(), count) for listed in volumes.values() for moment, count in listed], times),
        _findings(result, found, trace),
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
        + (f" Retention: nothing before {_moment(rule['floor'])} can be judged." if rule["floor"] else "")
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
        subjects = {"message": rule["counts"], **rule["groups"]}
        for place, (subject, counts) in enumerate(subjects.items()):
            path = f"{escape(rule['table'])} → {escape(rule['topic'])}"
            label = f"<b>{escape(rule['name'])}</b> <span class='dim'>{path}</span>"
            cells = "".join(_count_cell(name, counts[name.value]) for name in shown)
            name = "message" if not place else f"group {escape(subject)}"
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


def _findings(result: Mapping[str, Any], found: Sequence[Mapping[str, Any]], trace: str) -> str:
    if not found:
        return "<section><h2>Findings</h2><p>None.</p></section>"
    by_class: dict[str, list[Mapping[str, Any]]] = {}
    for finding in found:
        by_class.setdefault(finding["class"], []).append(finding)
    sections = []
    for name in (*classify.FAULTS, *CLOSED):
        listed = by_class.get(name.value)
        if listed:
            total = result["totals"][name.value]
            shown = "" if total == len(listed) else f", {len(listed)} shown"
            rows = "".join(_finding(finding, trace) for finding in listed)
            sections.append(
                f"<h3><i class='mark c-{name.value}'></i>{name.value} <span class='dim'>{total:,}{shown}</span></h3>"
                f"<p class='dim'>{escape(EXPLAINED[name])}</p>"
                "<div class='wide'><table class='found'><thead><tr><th>Key</th>"
                "<th>Rule</th><th>Group</th><th>Severity</th><th>What</th><th>Time</th><th>First seen</th></tr></thead>"
                f"{rows}</table></div>"
            )
    return (
        f"<section><h2>Findings</h2>{''.join(sections)}"
        f"<p class='dim'>All of them: <code>{escape(result['findings'])}</code> (Parquet) in the output folder.</p>"
        "</section>"
    )


def _finding(finding: Mapping[str, Any], trace: str) -> str:
    also = [flag for flag in finding["flags"] or [] if flag != finding["class"]]
    detail = escape(finding["detail"] or "")
    if also and finding["class"] not in CLOSED:
        detail += f" <span class='dim'>(also {escape(', '.join(also))})</span>"
    if finding["acknowledged"]:
        detail += f" <b>acknowledged</b> <span class='dim'>{escape(finding['acknowledged'])}</span>"
    cells = [
        f"<td><code>{escape(finding['key'])}</code></td>",
        f"<td>{escape(finding['rule'])}</td>",
        f"<td>{escape(finding['group'] or '–')}</td>",
        f"<td><span class='sev s-{escape(finding['severity'])}'>{escape(finding['severity'])}</span></td>",
        f"<td>{detail}</td>",
        f"<td class='t'>{escape(finding['at'] or '–')}</td>",
        f"<td class='t'>{escape(finding['first_seen'] or '–')}</td>",
    ]
    return f"<tbody><tr>{''.join(cells)}</tr>{_more(finding, trace)}</tbody>"


def _more(finding: Mapping[str, Any], trace: str) -> str:
    if finding["class"] in CLOSED:
        return ""
    times = {
        "row": finding["row_at"],
        "message stored": finding["message_at"],
        "decided": finding["settled_at"],
        "effect": finding["effect_at"],
    }
    known = " · ".join(f"{name} {escape(at)}" for name, at in times.items() if at)
    lines = [f"<dt>Times</dt><dd>{known or '–'}</dd>"]
    for label, name in (("Row", "row"), ("Body", "body")):
        value = finding[name]
        lines.append(f"<dt>{label}</dt><dd>{f'<code>{escape(value)}</code>' if value else '–'}</dd>")
    if finding["remedy"]:
        lines.append(f"<dt>What to do</dt><dd>{escape(finding['remedy'])}</dd>")
    command = trace_command(finding, trace)
    shown = f"<code>{escape(command)}</code>" if command else "no message exists"
    lines.append(f"<dt>Trace</dt><dd>{shown}</dd>")
    return f"<tr class='more'><td colspan='7'><dl>{''.join(lines)}</dl></td></tr>"


def trace_command(finding: Mapping[str, Any], trace: str) -> str:
    """The command that follows the finding's message through the broker; empty when there is no message."""
    if not finding["message_id"]:
        return ""
    return trace.replace("{message_id}", shlex.quote(finding["message_id"]))


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
        f"<li><i class='mark c-{name.value}'></i><b>{name.value}</b> {escape(EXPLAINED[name])}</li>"
        for name in classify.FAULTS
    )
    return (
        "<section><h2>How to read the classes</h2><p class='dim'>A key can be several at once; it is counted under the "
        "first that holds, in this order. The others are named beside it.</p>"
        f"<ol class='guide'>{items}</ol></section>"
    )


def _moment(text: str) -> str:
    return f"{datetime.fromisoformat(text):%Y-%m-%d %H:%M:%S}"
