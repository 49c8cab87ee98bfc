"""The report: one HTML file that needs no other file. Every value from the data is escaped in the HTML."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping, Sequence
from datetime import datetime
from html import escape
from importlib import resources
from typing import Any, Final

from pyspark.sql import DataFrame, Window
from pyspark.sql import functions as F

from ..common.safe_text import visible
from ..comparison import classify
from ..comparison.classify import FindingClass
from ..comparison.detail import DELIVERY_TEXTS
from ..comparison.remedies import REMEDIES
from .history import Day, Trend
from .plot import Times, open_plot, plot

SHOWN_TIMES: Final = ("at", "row_at", "message_at", "settled_at", "effect_at", "first_seen")


def samples(findings: DataFrame, per_class: int) -> list[dict[str, Any]]:
    """The oldest findings of each rule, class and group, with times as ISO 8601 texts."""
    order = Window.partitionBy("rule", "class", "group").orderBy("at", "key")
    times = {name: F.date_format(name, "yyyy-MM-dd HH:mm:ss") for name in SHOWN_TIMES}
    picked = findings.withColumn("place", F.row_number().over(order)).where(F.col("place") <= per_class)
    # The driver sorts these few rows, because Spark would run the query twice to sort them in parallel.
    rows = [row.asDict(recursive=True) for row in picked.withColumns(times).collect()]
    rows.sort(key=lambda row: (row["rule"], row["class"], row["group"], row.pop("place")))
    return rows


def render(
    result: Mapping[str, Any],
    found: Sequence[Mapping[str, Any]],
    times: Times,
    volumes: Mapping[str, list[tuple[datetime, int]]],
    trend: Trend,
    trace: str,
) -> str:
    """The HTML page of a result."""
    parts = [
        _head(result),
        _tiles(result),
        _counts(result),
        plot([(moment.timestamp(), count) for listed in volumes.values() for moment, count in listed], times),
        _history_section(trend),
        _findings_section(result, found, trace),
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
        f"{_seconds(result['finished_at'])}. All times are UTC.</p></header>"
    )


def _window_text(rule: Mapping[str, Any]) -> str:
    since = "all rows" if rule["since"] is None else f"rows from {_seconds(rule['since'])}"
    return (
        f"Judged: {since} up to <b>{_seconds(rule['until'])}</b> "
        f"(both sides complete up to {_seconds(rule['watermark'])}, grace {rule['grace_seconds']:g} s)."
        + _look_back_text(rule)
        + (f" Retention: rows from before {_seconds(rule['floor'])} cannot be judged." if rule["floor"] else "")
    )


def _look_back_text(rule: Mapping[str, Any]) -> str:
    """A sentence about the last look back, in which a run judged the rows of earlier runs again."""
    last = rule.get("looked_back")
    if rule["since"] is None:
        return ""
    if last is None:
        return (
            " If a row, message or effect from before this window changed later, the runs have not found the change, "
            "because no run has looked back (set look_back in the rule)."
        )
    since = "the beginning" if last["from"] is None else _seconds(last["from"])
    return (
        f" If a row, message or effect from before this window changes later, a look back finds the change. The last "
        f"look back, at <b>{_seconds(last['at'])}</b>, judged the rows from <b>{since}</b> on again."
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
                _seconds(reading["taken_at"]),
                _seconds(reading["watermark"]) if reading["watermark"] else "–",
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
        "<section><h2>How to read the classes</h2><p class='dim'>Several classes can hold for one "
        "key. The key is counted under the first of these classes, in the order of this list. The finding names the "
        "further classes after “also”.</p>"
        f"<ol class='guide'>{items}</ol></section>"
    )


def _seconds(text: str) -> str:
    return f"{datetime.fromisoformat(text):%Y-%m-%d %H:%M:%S}"


# The findings: a table per class. The reader can open each finding to see its row, messages and effects.

_COMMAND: Final = re.compile("`([^`]+)`")
_COLUMNS: Final = ("Key", "Rule", "Group", "Severity", "What", "Time", "First seen")
CLOSED: Final = (FindingClass.RECOVERED, FindingClass.EXPIRED)


def _findings_section(result: Mapping[str, Any], found: Sequence[Mapping[str, Any]], trace: str) -> str:
    """The section with the findings."""
    if not found:
        return "<section><h2>Findings</h2><p>None.</p></section>"
    by_class: dict[str, list[Mapping[str, Any]]] = {}
    for finding in found:
        by_class.setdefault(finding["class"], []).append(finding)
    head = "".join(f"<th>{name}</th>" for name in _COLUMNS)
    sections = []
    for name in (*classify.FAULTS, *CLOSED):
        listed = by_class.get(name.value)
        if listed:
            total = result["totals"][name.value]
            shown = "" if total == len(listed) else f", {len(listed)} shown"
            rows = "".join(_finding(finding, trace) for finding in listed)
            sections.append(
                f"<h3><i class='mark c-{name.value}'></i>{name.value} <span class='dim'>{total:,}{shown}</span></h3>"
                f"<p class='dim'>{escape(REMEDIES[name].meaning)}</p>"
                f"<div class='wide'><table class='found'><thead><tr>{head}</tr></thead>{rows}</table></div>"
            )
    return (
        f"<section><h2>Findings</h2>{''.join(sections)}"
        f"<p class='dim'>All findings: <code>{escape(result['findings'])}</code> (Parquet) in the output folder.</p>"
        "</section>"
    )


def _finding(finding: Mapping[str, Any], trace: str) -> str:
    also = [flag for flag in finding["flags"] or [] if flag != finding["class"]]
    detail = escape(finding["detail"] or "")
    if also and finding["class"] not in CLOSED:
        detail += f" <span class='dim'>(also {escape(', '.join(also))})</span>"
    if finding["acknowledged"]:
        detail += f" <b>acknowledged</b> <span class='dim'>{escape(finding['acknowledged'])}</span>"
    shown = (
        f"<code>{escape(visible(finding['key']))}</code>",
        escape(finding["rule"]),
        escape(finding["group"] or "–"),
        f"<span class='sev s-{escape(finding['severity'])}'>{escape(finding['severity'])}</span>",
        detail,
        f"<span class='t'>{escape(finding['at'] or '–')}</span>",
        f"<span class='t'>{escape(finding['first_seen'] or '–')}</span>",
    )
    # On a phone, the cells are below each other, and each cell begins with the name of its column.
    cells = [f"<td data-column='{name}'>{cell}</td>" for name, cell in zip(_COLUMNS, shown, strict=True)]
    return f"<tbody><tr>{''.join(cells)}</tr>{_more(finding, trace)}</tbody>"


def _more(finding: Mapping[str, Any], trace: str) -> str:
    """The remedy of a finding, and all evidence about the finding's key in a part of the page that the reader can
    open."""
    if finding["class"] in CLOSED:
        return ""
    remedy = _remedy(finding["remedy"] or "")
    known = json.loads(finding["evidence"] or "{}")
    command = trace_command(finding, trace)
    shown = f"<code>{escape(command)}</code>" if command else "no message exists"
    messages = known.get("messages") or []
    parts = [
        f"<dt>Row</dt><dd>{_code(finding['row'])} <span class='dim'>{escape(finding['row_at'] or '')}</span></dd>",
        f"<dt>Messages</dt><dd>{_messages_table(messages)}</dd>",
        *_part("Check-backs", _checks(messages)),
        f"<dt>Body</dt><dd>{_code(finding['body'])}</dd>",
        f"<dt>Groups</dt><dd>{_groups(known)}</dd>",
        *_part("Failed attempts", _failures(messages)),
        f"<dt>Trace</dt><dd>{shown}</dd>",
    ]
    return (
        f"<tr class='more'><td colspan='7'>{remedy}<details><summary>Row, messages and effects</summary>"
        f"<dl>{''.join(parts)}</dl></details></td></tr>"
    )


def _remedy(text: str) -> str:
    """Two paragraphs with commands as code: one about the first check, one about the settlement."""
    check, then, settle = text.partition(" Then: ")
    parts = [check, then.lstrip() + settle] if then else [check] if check else []
    return "".join(_COMMAND.sub(r"<code>\1</code>", f"<p>{escape(part)}</p>") for part in parts)


def _code(text: str | None) -> str:
    return f"<code>{escape(text)}</code>" if text else "none"


_DECIDED_BY: Final = {"P": "by the producer", "K": "by check-back", "O": "by an operator"}


def _messages_table(messages: Sequence[Mapping[str, Any]]) -> str:
    if not messages:
        return "none"
    rows = "".join(
        _row(
            f"<code>{escape(str(each.get('message_id') or ''))}</code>",
            escape(str(each.get("log_id") or "")),
            escape(str(each.get("tag") or "–")),
            _time(each.get("stored_at")),
            f"{escape(each['state'].replace('_', ' '))} {escape(_DECIDED_BY.get(each.get('decided_by') or '', ''))}",
            _time(each.get("decided_at")),
            _time(each.get("deliver_at")),
            escape(str(each.get("queue") or "–")),
        )
        for each in messages
    )
    return _table(("Message", "Log id", "Tag", "Stored", "Half", "Decided", "Not before", "Queued"), rows)


def _part(title: str, shown: str) -> list[str]:
    return [f"<dt>{title}</dt><dd>{shown}</dd>"] if shown else []


def _checks(messages: Sequence[Mapping[str, Any]]) -> str:
    """The check-backs of the messages' transactions, the newest last; empty if there are none."""
    asked = {each.get("transaction_id"): each.get("checks") or [] for each in messages}
    rows = [
        _row(
            f"<code>{escape(str(transaction))}</code>",
            _time(check["checked_at"]),
            escape(check["answer"]),
            escape(check["detail"]),
        )
        for transaction, checks in asked.items()
        for check in checks
    ]
    return _table(("Transaction", "Asked", "Answer", "Evidence"), "".join(rows)) if rows else ""


def _failures(messages: Sequence[Mapping[str, Any]]) -> str:
    """The failed attempts of handlers; empty if there are none."""
    rows = [
        _row(
            escape(failure["consumer_group"]),
            f"<code>{escape(str(each.get('message_id') or ''))}</code>",
            escape(str(failure["attempt"])),
            _time(failure["failed_at"]),
            escape(failure["error"]),
        )
        for each in messages
        for failure in each.get("failures") or []
    ]
    return _table(("Group", "Message", "Attempt", "Failed", "Error"), "".join(rows)) if rows else ""


def _groups(known: Mapping[str, Any]) -> str:
    """A table of the groups that the rule names or that subscribe to the topic, with each group's effects and
    delivery."""
    effects = {each["group"]: each for each in known.get("effects") or []}
    states = {each["group"]: each.get("delivery") for each in known.get("deliveries") or []}
    if not effects and not states:
        return "none"
    rows = []
    for group in dict.fromkeys((*effects, *states)):
        of = effects.get(group, {})
        count = "not asked" if group not in effects else str(of.get("effects", 0))
        state = DELIVERY_TEXTS.get(states.get(group) or "", "–")
        dead = f"{of['dead_letters']}" if of.get("dead_letters") else "–"
        rows.append(_row(escape(group), escape(count), _time(of.get("first_at")), escape(state), dead))
    return _table(("Group", "Effects", "First effect", "Delivery", "Dead letters"), "".join(rows))


def _row(*cells: str) -> str:
    return "<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>"


def _table(heads: Sequence[str], rows: str) -> str:
    head = "".join(f"<th>{name}</th>" for name in heads)
    return f"<table class='facts'><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"


def _time(text: str | None) -> str:
    return f"<span class='t'>{datetime.fromisoformat(text):%Y-%m-%d %H:%M:%S}</span>" if text else "–"


def trace_command(finding: Mapping[str, Any], trace: str) -> str:
    """The command that traces the finding's message through the broker; empty if the finding names no message."""
    if not finding["message_id"]:
        return ""
    return trace.replace("{message_id}", shlex.quote(finding["message_id"]))


# The history: open findings over the runs, findings per day, and the findings that ended last.

_SHOWN_DAYS: Final = 14


def _history_section(trend: Trend) -> str:
    """The section with the history; after the first run, the section is one sentence."""
    if len(trend.runs) < 2:
        return "<section><h2>History</h2><p class='dim'>This is the first run into this output folder.</p></section>"
    return (
        f"<section><h2>History</h2>{open_plot(trend.runs)}{_days(trend.days[:_SHOWN_DAYS])}{_ended(trend.ended)}"
        "<p class='dim'>The whole history: <code>history/counts</code> and <code>history/findings</code> (Parquet, by "
        "day) in the output folder.</p></section>"
    )


def _days(days: Sequence[Day]) -> str:
    names = [name.value for name in classify.FAULTS if any(day.open.get(name.value) for day in days)]
    head = "".join(f"<th class='n'><i class='mark c-{name}'></i>{name}</th>" for name in names)
    rows = "".join(
        f"<tr><td class='t'>{day.day.isoformat()}</td>"
        + "".join(_day_count(count) for count in (day.found, day.recovered, day.expired))
        + "".join(_day_count(day.open.get(name, 0)) for name in names)
        + "</tr>"
        for day in days
    )
    return (
        "<h3>Days</h3><p class='dim'>For each day (UTC): the number of findings that were found or ended on it, and, "
        "by class, the findings that were open after the last run of the day.</p><div class='wide'><table><thead><tr>"
        f"<th>Day</th><th class='n'>Found</th><th class='n'>Recovered</th><th class='n'>Expired</th>{head}</tr></thead>"
        f"<tbody>{rows}</tbody></table></div>"
    )


def _day_count(count: int) -> str:
    return f"<td class='{'n' if count else 'n zero'}'>{count:,}</td>"


def _ended(ended: Sequence[Mapping[str, Any]]) -> str:
    if not ended:
        return ""
    rows = "".join(
        f"<tr><td><code>{escape(row['key'] or '')}</code></td><td>{escape(row['rule'])}</td>"
        f"<td>{escape(row['group'] or '–')}</td><td>{escape(row['was'] or '–')}</td>"
        f"<td>{escape(row['event'].lower())}</td><td class='t'>{_datetime(row['first_seen'])}</td>"
        f"<td class='t'>{_datetime(row['finished_at'])}</td></tr>"
        for row in ended
    )
    return (
        f"<details><summary>What ended last ({len(ended)} shown)</summary><div class='wide'><table><thead><tr>"
        "<th>Key</th><th>Rule</th><th>Group</th><th>Was</th><th>How</th><th>First seen</th><th>Ended</th>"
        f"</tr></thead><tbody>{rows}</tbody></table></div></details>"
    )


def _datetime(moment: datetime | None) -> str:
    return "–" if moment is None else f"{moment:%Y-%m-%d %H:%M:%S}"
