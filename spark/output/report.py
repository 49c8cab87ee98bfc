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

from ..common.safe_text import escaped, visible
from ..judging import causes
from ..judging.detail import DELIVERY_TEXTS
from ..judging.remedies import TRACE
from ..rules.rule import CLASSES, CLOSED, FAULTS, FindingClass
from . import summary

# The causes that the page lists, with their findings. `result.json` has all.
SHOWN_CAUSES: Final = 30
# The number of characters of a value that the page shows.
_LONGEST: Final = 1_000
SHOWN_TIMES: Final = ("at", "row_at", "message_at", "settled_at", "effect_at", "first_seen")


def samples(findings: DataFrame, per_cause: int) -> list[dict[str, Any]]:
    """The oldest findings of each cause, acknowledged ones last, with times as ISO 8601 texts. `cause` is its id.

    A MISMATCH in several columns has several causes, and can be in the list once for each.
    """
    with_cause = findings.withColumn("cause", F.explode(causes.column()))
    is_known = F.col("acknowledged").isNotNull()
    order = Window.partitionBy("rule", "class", "group", "cause").orderBy(is_known, "at", "key")
    times = {name: F.date_format(name, "yyyy-MM-dd HH:mm:ss") for name in SHOWN_TIMES}
    picked = with_cause.withColumn("place", F.row_number().over(order)).where(F.col("place") <= per_cause)
    # The driver sorts these few rows, because Spark would run the query twice to sort them in parallel.
    rows = [row.asDict(recursive=True) for row in picked.withColumns(times).collect()]
    rows.sort(key=lambda row: (row["rule"], row["class"], row["group"], row["cause"], row.pop("place")))
    for row in rows:
        row["cause"] = causes.id_of(row["rule"], row["class"], row["group"], row["cause"])
    return rows


def render(result: Mapping[str, Any], found: Sequence[Mapping[str, Any]]) -> str:
    """The HTML page of a result, with the findings of its first SHOWN_CAUSES causes; `found` has some of each cause."""
    state = "clean" if result["status"] == "clean" else f"{result['faults']} findings"
    style = resources.files(__package__).joinpath("report.css").read_text("utf-8")
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">"
        f"<title>{_text(result['title'])}: {state}</title><style>{style}</style></head>\n<body><main>"
        f"{_head(result)}{_actions(result)}{_causes(result)}{_counts(result)}{_last_runs(result)}"
        f"{_findings(result, found)}{_boundary(result)}</main></body></html>\n"
    )


def _text(value: object) -> str:
    """A value from the data or the rules for the page, cut if it is long, with escapes for invisible characters."""
    return escape(escaped(_cut(str(value))))


def _cut(text: str, longest: int = _LONGEST) -> str:
    return text if len(text) <= longest else f"{text[:longest]}…"


def _head(result: Mapping[str, Any]) -> str:
    faults = result["faults"]
    noun = "finding" if faults == 1 else "findings"
    badge = ('<b class="badge ok">clean</b>') if not faults else f'<b class="badge bad">{faults:,} {noun}</b>'
    return (
        f"<header><h1>{_text(result['title'])} {badge}</h1><p>{_text(summary.boundary(result))}</p>"
        f'<p class="dim">Run {escape(result["run"])} ({escape(result["mode"])}), finished '
        f"{_seconds(result['finished_at'])}. All times are UTC.</p></header>"
    )


def _actions(result: Mapping[str, Any]) -> str:
    """The section with the most urgent actions; empty if there are no open findings."""
    urgent = summary.urgent(result)
    if not urgent:
        return ""
    items = "".join(
        f"<li>{_link(cause, _text(cause['subject']))}: <b>{summary.counted(cause)}</b>. "
        f"{_text(cause['meaning'])}{_commands(cause['commands'])}</li>"
        for cause in urgent[: summary.SHOWN_ACTIONS]
    )
    return f"<section><h2>What to do first</h2><ol class='first'>{items}</ol></section>"


def _link(cause: Mapping[str, Any], text: str) -> str:
    """The text as a link to the findings of the cause."""
    return f"<a href='#c-{cause['id']}'>{text}</a>"


def _commands(commands: Sequence[str]) -> str:
    return f"<pre>{escape(escaped(chr(10).join(commands)))}</pre>" if commands else ""


_CAUSE_COLUMNS: Final = ("Class", "Column or delivery", "Rule", "Group", "Severity", "Oldest", "Cause")


def _causes(result: Mapping[str, Any]) -> str:
    """The section with one line for each of the first causes."""
    if not result["causes"]:
        return ""
    rows = "".join(map(_cause_row, result["causes"][:SHOWN_CAUSES]))
    left = len(result["causes"]) - SHOWN_CAUSES
    new, known = (f"<th class='n'>{name}</th>" for name in ("New", "Acknowledged"))
    head = f"<th class='n'>Findings</th>{new}{''.join(f'<th>{name}</th>' for name in _CAUSE_COLUMNS)}{known}"
    listing = f"{result['causes'][0]['listing'].rpartition(' ')[0]} CAUSE"
    further = f"<p class='dim'>{left:,} further causes: <code>causes</code> in <code>result.json</code>.</p>"
    return (
        "<section><h2>Causes</h2><p class='dim'>One line per cause, the most urgent first. A mismatch in several "
        f"columns is counted in each of them. All findings of a cause: <code>{_text(listing)}</code></p>"
        f"<div class='wide'><table class='causes'><thead><tr>{head}</tr></thead>"
        f"<tbody>{rows}</tbody></table></div>{further if left > 0 else ''}</section>"
    )


def _cause_row(cause: Mapping[str, Any]) -> str:
    findings = _link(cause, f"{cause['findings']:,}")
    texts = (
        f"<i class='mark c-{cause['class']}'></i>{cause['class']}",
        _text(cause["detail"] or "–"),
        _text(cause["rule"]),
        _text(cause["group"] or "–"),
        f"<span class='sev s-{escape(cause['severity'])}'>{escape(cause['severity'])}</span>",
        f"<span class='t'>{_seconds(cause['oldest'])}</span>" if cause["oldest"] else "–",
        f"<code>{cause['id']}</code>",
    )
    cells = "".join(f"<td>{text}</td>" for text in texts)
    return f"<tr><td class='n'>{findings}</td>{_number(cause['new'])}{cells}{_number(cause['acknowledged'])}</tr>"


def _window_text(rule: Mapping[str, Any]) -> str:
    since = "all rows" if rule["since"] is None else f"rows from {_seconds(rule['since'])}"
    return (
        f"{since} up to <b>{_seconds(rule['until'])}</b> "
        f"(both sides complete up to {_seconds(rule['watermark'])}, grace {rule['grace_seconds']:g} s)."
        f" {rule['rows_read']:,} rows and {rule['messages_read']:,} messages were read."
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
            "because no run has looked back (the rule has look_back = 0s)."
        )
    since = "the beginning" if last["from"] is None else _seconds(last["from"])
    return (
        f" If a row, message or effect from before this window changes later, a look back finds the change. The last "
        f"look back, at <b>{_seconds(last['at'])}</b>, judged the rows from <b>{since}</b> on again."
    )


def _counts(result: Mapping[str, Any]) -> str:
    shown = [name for name in CLASSES if name in _ALWAYS or result["totals"][name.value]]
    head = "".join(f"<th class='n'>{name.value}</th>" for name in shown)
    rows, urgent = [], {(cause["rule"], cause["group"], cause["class"]) for cause in summary.urgent(result)}
    for rule in result["rules"]:
        for place, (group, counts) in enumerate([("", rule["counts"]), *rule["groups"].items()]):
            path = f"{_text(rule['table'])} → {_text(rule['topic'])}"
            label = f"<b>{_text(rule['name'])}</b> <span class='dim'>{path}</span>"
            red = [name for name in shown if (rule["name"], group, name.value) in urgent]
            cells = "".join(_number(counts[name.value], "n fault" if name in red else "n") for name in shown)
            name = "message" if not place else f"group {_text(group)}"
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
            rows.append("<tr>" + "".join(f"<td>{_text(cell)}</td>" for cell in cells) + "</tr>")
    windows = [f"<li><b>{_text(rule['name'])}</b>: {_window_text(rule)}</li>" for rule in result["rules"]]
    notes = [
        f"<li><b>{_text(rule['name'])}</b>: {_text(note)}</li>" for rule in result["rules"] for note in rule["notes"]
    ]
    return (
        "<section><h2>What was compared</h2><div class='wide'><table><thead><tr><th>Look</th><th>Database</th>"
        "<th>Identity</th><th>Snapshot taken</th><th>Complete up to</th><th>Snapshot</th><th>Notes</th></tr></thead>"
        f"<tbody>{''.join(rows)}</tbody></table></div><ul>{''.join((*windows, *notes))}</ul></section>"
    )


def _seconds(text: str) -> str:
    return f"{datetime.fromisoformat(text):%Y-%m-%d %H:%M:%S}"


# The findings: a table per cause. The reader can open each finding to see its row, messages and effects.

_COMMAND: Final = re.compile("`([^`]+)`")
_COLUMNS: Final = ("Key", "What", "Time", "First seen")


def _findings(result: Mapping[str, Any], found: Sequence[Mapping[str, Any]]) -> str:
    """The section with the findings of the first causes."""
    if not found:
        return "<section><h2>Findings</h2><p>None.</p></section>"
    by_cause: dict[str, list[Mapping[str, Any]]] = {}
    for finding in found:
        by_cause.setdefault(finding["cause"], []).append(finding)
    head = "<thead><tr>" + "".join(f"<th>{name}</th>" for name in _COLUMNS) + "</tr></thead>"
    sections = []
    for cause in result["causes"][:SHOWN_CAUSES]:
        if (listed := by_cause.get(cause["id"])) is None:
            continue
        rows = "".join(f"<tbody>{_finding(each)}{_more(each)}</tbody>" for each in listed)
        title, text = _cause_head(cause, listed)
        text += f"<div class='wide'><table class='found'>{head}{rows}</table></div>"
        is_folded = cause["findings"] == cause["acknowledged"]
        sections.append(f"<details><summary>{title}</summary>{text}</details>" if is_folded else title + text)
    return (
        f"<section><h2>Findings</h2>{''.join(sections)}<p class='dim'>All findings with all columns: "
        f"<code>{escape(result['findings'])}</code> (Parquet) in the output folder.</p></section>"
    )


def _cause_head(cause: Mapping[str, Any], listed: Sequence[Mapping[str, Any]]) -> tuple[str, str]:
    """The heading of a cause, and its remedy, which names the ids of the first finding, with its commands."""
    first = listed[0]
    remedy = first["remedy"] or "" if cause["commands"] else ""
    has_id = any(first.get(name) and first[name] in remedy for name in ("message_id", "transaction_id"))
    of_several = " The remedy has the ids of the first finding." if cause["findings"] > 1 and has_id else ""
    commands = "" if cause["commands"] == [cause["listing"]] else _commands(cause["commands"])
    rest = f"{commands}<p class='dim'>{len(listed)} shown, the oldest first.{of_several} All: "
    return (
        f"<h3 id='c-{cause['id']}'><i class='mark c-{cause['class']}'></i>{_text(cause['subject'])} "
        f"<span class='dim'>{summary.counted(cause)}</span></h3>",
        f"<p class='dim'>{_text(cause['meaning'])}</p><div class='remedy'>{_remedy(remedy)}</div>"
        f"{rest}<code>{_text(cause['listing'])}</code></p>",
    )


def _finding(finding: Mapping[str, Any]) -> str:
    """The row of a finding."""
    also = [flag for flag in finding["flags"] or [] if flag != finding["class"]]
    detail = _text(finding["detail"] or "")
    if also and finding["class"] not in CLOSED:
        detail += f" <span class='dim'>(also {_text(', '.join(also))})</span>"
    if finding["acknowledged"]:
        detail += f" <b>acknowledged</b> <span class='dim'>{_text(finding['acknowledged'])}</span>"
    shown = (
        f"<code>{escape(visible(_cut(finding['key'])))}</code>",
        detail,
        f"<span class='t'>{escape(finding['at'] or '–')}</span>",
        f"<span class='t'>{escape(finding['first_seen'] or '–')}</span>",
    )
    # On a phone, the cells are below each other, and each cell begins with the name of its column.
    cells = [f"<td data-column='{name}'>{cell}</td>" for name, cell in zip(_COLUMNS, shown, strict=True)]
    return f"<tr>{''.join(cells)}</tr>"


def _more(finding: Mapping[str, Any]) -> str:
    """All evidence about the finding's key, in a part of the page that the reader can open."""
    if finding["class"] in CLOSED:
        return ""
    known = json.loads(finding["evidence"] or "{}")
    message_id = finding["message_id"]
    trace = f"<code>{_text(TRACE.replace('{message_id}', shlex.quote(message_id)))}</code>" if message_id else ""
    messages = known.get("messages") or []
    parts = [
        f"<dt>Row</dt><dd>{_code(finding['row'])} <span class='dim'>{escape(finding['row_at'] or '')}</span></dd>",
        f"<dt>Messages</dt><dd>{_messages_table(messages)}</dd>",
        f"<dt>Body</dt><dd>{_code(finding['body'])}</dd>",
        f"<dt>Groups</dt><dd>{_groups(known)}</dd>",
        f"<dt>Trace</dt><dd>{trace or 'no message exists'}</dd>",
    ]
    return (
        f"<tr class='more'><td colspan='4'><details><summary>Row, messages and effects</summary>"
        f"<dl>{''.join(parts)}</dl></details></td></tr>"
    )


def _remedy(text: str) -> str:
    """Two paragraphs with commands as code: one about the first check, one about the settlement."""
    check, then, settle = text.partition(" Then: ")
    parts = [check, then.lstrip() + settle] if then else [check] if check else []
    return "".join(_COMMAND.sub(r"<code>\1</code>", f"<p>{escape(part)}</p>") for part in parts)


def _code(text: str | None) -> str:
    # Of a row or body with several values.
    return f"<code>{escape(escaped(_cut(text, 4 * _LONGEST)))}</code>" if text else "none"


_DECIDED_BY: Final = {"P": "by the producer", "K": "by check-back", "O": "by an operator"}


def _messages_table(messages: Sequence[Mapping[str, Any]]) -> str:
    if not messages:
        return "none"
    rows = "".join(
        _row(
            f"<code>{_text(each.get('message_id') or '')}</code>",
            _text(each.get("log_id") or ""),
            _text(each.get("tag") or "–"),
            _time(each.get("stored_at")),
            f"{_text(each['state'].replace('_', ' '))} {escape(_DECIDED_BY.get(each.get('decided_by') or '', ''))}",
            _time(each.get("decided_at")),
            _time(each.get("deliver_at")),
        )
        for each in messages
    )
    return _table(("Message", "Log id", "Tag", "Stored", "Half", "Decided", "Not before"), rows)


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
        rows.append(_row(_text(group), escape(count), _time(of.get("first_at")), escape(state), dead))
    return _table(("Group", "Effects", "First effect", "Delivery", "Dead letters"), "".join(rows))


def _row(*cells: str) -> str:
    return "<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>"


def _table(heads: Sequence[str], rows: str) -> str:
    head = "".join(f"<th>{name}</th>" for name in heads)
    return f"<table class='facts'><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"


def _time(text: str | None) -> str:
    return f"<span class='t'>{datetime.fromisoformat(text):%Y-%m-%d %H:%M:%S}</span>" if text else "–"


def _last_runs(result: Mapping[str, Any]) -> str:
    """The section with the findings that were open after the last runs, the newest first."""
    runs = result["last_runs"][::-1]
    names = [name for name in FAULTS if any(each["open"].get(name) for each in runs)]
    rows = "".join(
        f"<tr><td class='t'>{_seconds(each['finished_at'])}</td>{_number(sum(each['open'].values()))}"
        + "".join(_number(each["open"].get(name, 0)) for name in names)
        + "</tr>"
        for each in runs
    )
    heads = "".join(f"<th class='n'>{name}</th>" for name in ("All", *names))
    return (
        "<section><h2>Last runs</h2><p class='dim'>The findings that were open after each run, by class.</p>"
        f"<div class='wide'><table><thead><tr><th>Finished</th>{heads}</tr></thead><tbody>{rows}</tbody></table></div>"
        "</section>"
    )


def _number(count: int, css: str = "n") -> str:
    return f"<td class='{css if count else 'n zero'}'>{count:,}</td>"
