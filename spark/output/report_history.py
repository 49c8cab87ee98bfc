"""The history in the report: open findings over the runs, what days brought, and what ended last."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from html import escape
from typing import Any, Final

from ..comparison import classify
from .history import Day, Trend
from .report_plot import open_plot

_SHOWN_DAYS: Final = 14


def section(trend: Trend) -> str:
    """The section; one sentence after the first run."""
    if len(trend.runs) < 2:
        return "<section><h2>History</h2><p class='dim'>This is the first run into this output folder.</p></section>"
    return (
        f"<section><h2>History</h2>{open_plot(trend.runs)}{_days(trend.days[:_SHOWN_DAYS])}{_ended(trend.ended)}"
        "<p class='dim'>All of it: <code>history/counts</code> and <code>history/findings</code> (Parquet, by day) in "
        "the output folder.</p></section>"
    )


def _days(days: Sequence[Day]) -> str:
    names = [name.value for name in classify.FAULTS if any(day.open.get(name.value) for day in days)]
    head = "".join(f"<th class='n'><i class='mark c-{name}'></i>{name}</th>" for name in names)
    rows = "".join(
        f"<tr><td class='t'>{day.day.isoformat()}</td>"
        + "".join(_count(count) for count in (day.found, day.recovered, day.expired))
        + "".join(_count(day.open.get(name, 0)) for name in names)
        + "</tr>"
        for day in days
    )
    return (
        "<h3>Days</h3><p class='dim'>What was found and what ended in the day (UTC), and what was open after its last "
        "run, by class.</p><div class='wide'><table><thead><tr><th>Day</th><th class='n'>Found</th>"
        f"<th class='n'>Recovered</th><th class='n'>Expired</th>{head}</tr></thead><tbody>{rows}</tbody></table></div>"
    )


def _count(count: int) -> str:
    return f"<td class='{'n' if count else 'n zero'}'>{count:,}</td>"


def _ended(ended: Sequence[Mapping[str, Any]]) -> str:
    if not ended:
        return ""
    rows = "".join(
        f"<tr><td><code>{escape(row['key'] or '')}</code></td><td>{escape(row['rule'])}</td>"
        f"<td>{escape(row['group'] or '–')}</td><td>{escape(row['was'] or '–')}</td>"
        f"<td>{escape(row['event'].lower())}</td><td class='t'>{_moment(row['first_seen'])}</td>"
        f"<td class='t'>{_moment(row['finished_at'])}</td></tr>"
        for row in ended
    )
    return (
        f"<details><summary>What ended last ({len(ended)} shown)</summary><div class='wide'><table><thead><tr>"
        "<th>Key</th><th>Rule</th><th>Group</th><th>Was</th><th>How</th><th>First seen</th><th>Ended</th>"
        f"</tr></thead><tbody>{rows}</tbody></table></div></details>"
    )


def _moment(moment: datetime | None) -> str:
    return "–" if moment is None else f"{moment:%Y-%m-%d %H:%M:%S}"
