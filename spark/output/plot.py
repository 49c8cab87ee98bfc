"""The plots of the report: stacked bars of findings by class over time. The browser lays them out."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc

from ..rules.rule import FAULTS

# Each bar costs up to 500 bytes of the page.
BARS: Final = 40
_STEPS: Final = (1, 10, 60, 300, 900, 3600, 6 * 3600, 86400, 7 * 86400)
_NAMED: Final = 3
Counts = Mapping[str, int]
"""The number of findings of each class."""


def timeline(found: pa.Table) -> str:
    """The section with the findings by their time. `found` has the columns class and at. Empty if no finding has a
    time."""
    is_fault = pc.is_in(found["class"], pa.array([name.value for name in FAULTS]))
    timed = found.filter(pc.and_(is_fault, pc.is_valid(found["at"])))
    if not len(timed):
        return ""
    seconds = pc.divide(timed["at"].cast(pa.timestamp("us", tz="UTC")).cast(pa.int64()), 1_000_000)
    low, width, bars = _axis(pc.min(seconds).as_py(), pc.max(seconds).as_py())
    numbered = pa.table({"class": timed["class"], "bar": pc.divide(pc.subtract(seconds, low), width)})
    sums: list[dict[str, int]] = [{} for _ in range(bars)]
    for row in numbered.group_by(["class", "bar"]).aggregate([([], "count_all")]).to_pylist():
        sums[row["bar"]][row["class"]] = row["count_all"]
    figure = _figure("Findings by the time of their row or message", low, width, [each or None for each in sums])
    return f"<section><h2>Timeline</h2>{figure}</section>"


def open_plot(runs: Sequence[tuple[float, Counts]]) -> str:
    """The plot of the findings that were open after the last run of each bar.

    `runs` has the time and the counts of each run, in ascending order of time.
    """
    low, width, bars = _axis(int(runs[0][0]), int(runs[-1][0]))
    last: list[Counts | None] = [None] * bars
    for moment, counts in runs:
        last[(int(moment) - low) // width] = counts
    return _figure("Open findings after the last run of each bar", low, width, last)


def _axis(low: int, high: int) -> tuple[int, int, int]:
    """The begin of the first bar (in seconds since 1970), the seconds of each bar, and the number of bars."""
    span = high - low
    width = next((step for step in _STEPS if span / step < BARS - 1), math.ceil(span / (BARS - 1)))
    low -= low % width
    return low, width, (high - low) // width + 1


def _figure(title: str, low: int, width: int, bars: Sequence[Counts | None]) -> str:
    most = max([1, *(sum(counts.values()) for counts in bars if counts)])
    drawn = "".join(_bar(_when(low + place * width), counts, most) for place, counts in enumerate(bars))
    names = [name for name in FAULTS if any(counts.get(name) for counts in bars if counts)]
    legend = "".join(f"<span><i class='mark c-{name}'></i>{name}</span>" for name in names)
    return (
        f"<h3>{title}</h3><figure><div class='bars' role='img' aria-label='{title}'>{drawn}</div><figcaption>"
        f"<span>{_when(low)} to {_when(low + len(bars) * width)}, a bar per {_span(width)}, the highest has {most:,}"
        f"</span>{legend or 'no findings'}</figcaption></figure>"
    )


def _bar(when: str, counts: Counts | None, most: int) -> str:
    if counts is None:
        return "<div></div>"
    found = {name.value: counts[name] for name in reversed(FAULTS) if counts.get(name)}
    if not found:
        return f"<div title='{when}: no findings'><i class='clean'></i></div>"
    largest = sorted(found, key=lambda name: -found[name])
    texts = [f"{found[name]:,} {name}" for name in largest[:_NAMED]] + ["…"] * (len(largest) > _NAMED)
    parts = "".join(f"<i class=c-{name} style=height:{100 * n / most:.1f}%></i>" for name, n in found.items())
    return f"<div title='{when}: {', '.join(texts)}'>{parts}</div>"


def _when(moment: int) -> str:
    return f"{datetime.fromtimestamp(moment, UTC):%Y-%m-%d %H:%M:%S}"


def _span(seconds: int) -> str:
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size and seconds % size == 0:
            return f"{seconds // size} {unit}"
    return f"{seconds} s"
