"""The first lines of a result: the most urgent actions with their commands, and the boundary."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import datetime, timedelta
from typing import Any, Final

from ..rules.rule import CLOSED

SHOWN_ACTIONS: Final = 3
# A database whose watermark is older than this when the run ends is named as the reason for the lag.
_LAGGING: Final = timedelta(seconds=60)


def urgent(result: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The causes with open findings, the most urgent first."""
    open_ones = (each for each in result["causes"] if each["findings"] > each["acknowledged"])
    return [each for each in open_ones if each["class"] not in CLOSED]


def counts(result: Mapping[str, Any]) -> Iterator[tuple[Mapping[str, Any], str, str, int]]:
    """The number of subjects of each rule, group ('' for the messages) and class."""
    for rule in result["rules"]:
        for group, counted in {"": rule["counts"], **rule["groups"]}.items():
            for name, count in counted.items():
                yield rule, group, name, count


def counted(cause: Mapping[str, Any]) -> str:
    """The number of findings of a cause, as a text such as `1,200 (12 new, 3 acknowledged)`."""
    parts = [f"{cause[name]:,} {name}" for name in ("new", "acknowledged") if cause[name]]
    return f"{cause['findings']:,}" + (f" ({', '.join(parts)})" if parts else "")


def lines(result: Mapping[str, Any]) -> list[str]:
    """The text that a run prints before its totals."""
    causes, texts = urgent(result), []
    for number, cause in enumerate(causes[:SHOWN_ACTIONS], 1):
        texts.append(f"{number}. {_one_line(cause['subject'])}: {counted(cause)}. {cause['meaning']}")
        texts += [f"   {_one_line(command)}" for command in cause["commands"]]
    if len(causes) > SHOWN_ACTIONS:
        texts.append(f"Further causes in the report: {len(causes) - SHOWN_ACTIONS:,}.")
    if result.get("is_tolerated"):
        texts.append("Warning: there are findings, but not more than fail_above of the rules, so the exit code is 0.")
    return [*texts, boundary(result)]


def _one_line(text: str) -> str:
    """The text with `\\n` in place of line breaks, so that a name cannot print a line of its own."""
    return text.replace("\n", "\\n")


def boundary(result: Mapping[str, Any]) -> str:
    """A sentence about the time up to which the run judged, and how long before the end of the run this time was.

    The sentence is about the rule that lags most. If a database was not complete up to the present, a second sentence
    names it.
    """
    if result["mode"] == "interval":
        since, until = (datetime.fromisoformat(text) for text in result["interval"])
        return f"Judged: the interval from {since:%Y-%m-%d %H:%M:%S} to {until:%Y-%m-%d %H:%M:%S} UTC."
    last = min(result["rules"], key=lambda rule: datetime.fromisoformat(rule["until"]))
    until, finished = datetime.fromisoformat(last["until"]), datetime.fromisoformat(result["finished_at"])
    of_rule = f" for the rule {_one_line(last['name'])}" if len(result["rules"]) > 1 else ""
    lag = max(timedelta(0), timedelta(seconds=round((finished - until).total_seconds())))
    text = (
        f"Judged up to {until:%Y-%m-%d %H:%M:%S} UTC{of_rule}, {lag} before the end of the run "
        f"(grace: {last['grace_seconds']:g} s)."
    )
    dated = [each for each in result["snapshots"] if each["watermark"]]
    behind = min(dated, key=lambda each: datetime.fromisoformat(each["watermark"]), default=None)
    if behind is None:
        return text
    complete = datetime.fromisoformat(behind["watermark"])
    if datetime.fromisoformat(behind["taken_at"]) - complete < _LAGGING:
        return text
    notes = f": {behind['notes'][0]}" if behind["notes"] else ""
    return f"{text} The database {behind['database']} is complete only up to {complete:%Y-%m-%d %H:%M:%S}{notes}."
