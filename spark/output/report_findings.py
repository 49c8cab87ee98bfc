"""The findings in the report: a table per class, and of each finding its row, messages and effects to be opened."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping, Sequence
from datetime import datetime
from html import escape
from typing import Any, Final

from ..comparison import classify
from ..comparison.classify import FindingClass
from ..comparison.detail import DELIVERY_TEXTS
from ..safe_text import visible
from .remedies import REMEDIES

_COMMAND: Final = re.compile("`([^`]+)`")
_COLUMNS: Final = ("Key", "Rule", "Group", "Severity", "What", "Time", "First seen")
CLOSED: Final = (FindingClass.RECOVERED, FindingClass.EXPIRED)


def section(result: Mapping[str, Any], found: Sequence[Mapping[str, Any]], trace: str) -> str:
    """The section."""
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
    shown = (
        f"<code>{escape(visible(finding['key']))}</code>",
        escape(finding["rule"]),
        escape(finding["group"] or "–"),
        f"<span class='sev s-{escape(finding['severity'])}'>{escape(finding['severity'])}</span>",
        detail,
        f"<span class='t'>{escape(finding['at'] or '–')}</span>",
        f"<span class='t'>{escape(finding['first_seen'] or '–')}</span>",
    )
    # On a phone a cell stands below the other, each with its column's name before it.
    cells = [f"<td data-column='{name}'>{cell}</td>" for name, cell in zip(_COLUMNS, shown, strict=True)]
    return f"<tbody><tr>{''.join(cells)}</tr>{_more(finding, trace)}</tbody>"


def _more(finding: Mapping[str, Any], trace: str) -> str:
    """What to do, and behind it, to be opened, everything that is known of the finding's key."""
    if finding["class"] in CLOSED:
        return ""
    remedy = _remedy(finding["remedy"] or "")
    known = json.loads(finding["evidence"] or "{}")
    command = trace_command(finding, trace)
    shown = f"<code>{escape(command)}</code>" if command else "no message exists"
    messages = known.get("messages") or []
    parts = [
        f"<dt>Row</dt><dd>{_code(finding['row'])} <span class='dim'>{escape(finding['row_at'] or '')}</span></dd>",
        f"<dt>Messages</dt><dd>{_messages(messages)}</dd>",
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
    """A paragraph for what to check and one for what settles it, with the commands in them as code."""
    check, then, settle = text.partition(" Then: ")
    parts = [check, then.lstrip() + settle] if then else [check] if check else []
    return "".join(_COMMAND.sub(r"<code>\1</code>", f"<p>{escape(part)}</p>") for part in parts)


def _code(text: str | None) -> str:
    return f"<code>{escape(text)}</code>" if text else "none"


_DECIDED_BY: Final = {"P": "by the producer", "K": "by check-back", "O": "by an operator"}


def _messages(messages: Sequence[Mapping[str, Any]]) -> str:
    if not messages:
        return "none"
    rows = "".join(
        _row(
            f"<code>{escape(str(each.get('message_id') or ''))}</code>",
            escape(str(each.get("log_id") or "")),
            escape(str(each.get("tag") or "–")),
            _moment(each.get("stored_at")),
            f"{escape(each['state'].replace('_', ' '))} {escape(_DECIDED_BY.get(each.get('decided_by') or '', ''))}",
            _moment(each.get("decided_at")),
            _moment(each.get("deliver_at")),
            escape(str(each.get("queue") or "–")),
        )
        for each in messages
    )
    return _table(("Message", "Log id", "Tag", "Stored", "Half", "Decided", "Not before", "Queued"), rows)


def _part(title: str, shown: str) -> list[str]:
    return [f"<dt>{title}</dt><dd>{shown}</dd>"] if shown else []


def _checks(messages: Sequence[Mapping[str, Any]]) -> str:
    """How the transactions of the messages were asked for, the newest last; empty when none was."""
    asked = {each.get("transaction_id"): each.get("checks") or [] for each in messages}
    rows = [
        _row(
            f"<code>{escape(str(transaction))}</code>",
            _moment(check["checked_at"]),
            escape(check["answer"]),
            escape(check["detail"]),
        )
        for transaction, checks in asked.items()
        for check in checks
    ]
    return _table(("Transaction", "Asked", "Answer", "What it rests on"), "".join(rows)) if rows else ""


def _failures(messages: Sequence[Mapping[str, Any]]) -> str:
    """How handlers failed with the messages; empty when none did."""
    rows = [
        _row(
            escape(failure["consumer_group"]),
            f"<code>{escape(str(each.get('message_id') or ''))}</code>",
            escape(str(failure["attempt"])),
            _moment(failure["failed_at"]),
            escape(failure["error"]),
        )
        for each in messages
        for failure in each.get("failures") or []
    ]
    return _table(("Group", "Message", "Attempt", "Failed", "Error"), "".join(rows)) if rows else ""


def _groups(known: Mapping[str, Any]) -> str:
    """Every group that the rule names or that subscribes: its effects, and how far the message got with it."""
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
        rows.append(_row(escape(group), escape(count), _moment(of.get("first_at")), escape(state), dead))
    return _table(("Group", "Effects", "First effect", "Delivery", "Dead letters"), "".join(rows))


def _row(*cells: str) -> str:
    return "<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>"


def _table(heads: Sequence[str], rows: str) -> str:
    head = "".join(f"<th>{name}</th>" for name in heads)
    return f"<table class='told'><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"


def _moment(text: str | None) -> str:
    return f"<span class='t'>{datetime.fromisoformat(text):%Y-%m-%d %H:%M:%S}</span>" if text else "–"


def trace_command(finding: Mapping[str, Any], trace: str) -> str:
    """The command that follows the finding's message through the broker; empty when there is no message."""
    if not finding["message_id"]:
        return ""
    return trace.replace("{message_id}", shlex.quote(finding["message_id"]))
