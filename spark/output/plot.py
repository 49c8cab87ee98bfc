"""The plots of the report, as inline SVG: rows and findings over time, and open findings over the runs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import pairwise
from typing import Final

from ..rules.rule import FAULTS
from ..stages.scan import BARS

Times = list[tuple[str, float, int]]
"""The class, time (in seconds since 1970) and count of findings."""

_FEWEST_BARS: Final = 6
_STEPS: Final = (1.0, 10.0, 60.0, 300.0, 900.0, 3600.0, 6 * 3600.0, 86400.0, 7 * 86400.0)
_WIDTH, _LEFT, _RIGHT = 1080.0, 64.0, 10.0
_ROWS_TOP, _ROWS_HEIGHT = 26.0, 90.0
_FOUND_TOP, _FOUND_HEIGHT = 146.0, 90.0
_HEIGHT: Final = 268.0
_TICKS: Final = 6
_NAMED: Final = 3


@dataclass(frozen=True, slots=True)
class _Axis:
    """A time axis that begins at `low` (seconds since 1970) and has `bins` buckets of `width` seconds."""

    low: float
    width: float
    bins: int

    def place(self, moment: float) -> int:
        """The number of the bucket that contains a moment."""
        return min(self.bins - 1, int((moment - self.low) / self.width))

    def x(self, place: float) -> float:
        """The horizontal position at which the bucket `place` begins."""
        return _LEFT + place * (_WIDTH - _LEFT - _RIGHT) / self.bins


def plot(volume: list[tuple[float, int]], times: Times) -> str:
    """The section with the timeline; empty if no row and no finding has a time."""
    moments = [moment for moment, _ in volume] + [moment for _, moment, _ in times]
    if not moments:
        return ""
    low, high = min(moments), max(moments)
    # `volume` has one row count for each bucket of time. A bar is as wide as a whole number of these buckets. With
    # other widths, there would be gaps between the bars.
    steps = [later - sooner for (sooner, _), (later, _) in pairwise(sorted(volume)) if later > sooner]
    step = min(steps, default=1.0)
    width = step * max(1, math.ceil((high - low + step) / step / BARS))
    axis = _Axis(low, width, max(_FEWEST_BARS, math.ceil((high - low + step) / width)))
    rows = [0] * axis.bins
    for moment, count in volume:
        rows[axis.place(moment)] += count
    found: list[dict[str, int]] = [{} for _ in range(axis.bins)]
    for name, moment, count in times:
        bucket = found[axis.place(moment)]
        bucket[name] = bucket.get(name, 0) + count
    texts = [
        "; ".join(filter(None, (f"{count:,} rows" if count else "", _stack_text(bucket))))
        for count, bucket in zip(rows, found, strict=True)
    ]
    per_bar = f"per {_span(width)}"
    parts = [
        _lane(f"rows {per_bar}", _ROWS_TOP, _ROWS_HEIGHT, max(rows)),
        _lane(f"findings {per_bar}", _FOUND_TOP, _FOUND_HEIGHT, max(sum(bucket.values()) for bucket in found)),
        *_bars(axis, rows),
        *_stacks(axis, found, _FOUND_TOP + _FOUND_HEIGHT, _FOUND_HEIGHT),
        *_titles(axis, _FOUND_TOP + _FOUND_HEIGHT - _ROWS_TOP, texts),
        *_ticks(axis, _HEIGHT - 10),
    ]
    return f"<section><h2>Timeline</h2>{_figure('Rows and findings over time', _HEIGHT, parts, found)}</section>"


def open_plot(runs: Sequence[tuple[float, Mapping[str, int]]]) -> str:
    """The plot of open findings by class, after the last run of each bucket of time.

    `runs` has the time and the counts of each run, in ascending order of time.
    """
    low, high = runs[0][0], runs[-1][0]
    width = next((step for step in _STEPS if (high - low) / step < BARS - 1), _STEPS[-1])
    low -= low % width
    axis = _Axis(low, width, max(_FEWEST_BARS, int((high - low) / width) + 1))
    left_open: list[dict[str, int]] = [{} for _ in range(axis.bins)]
    seen = set()
    for moment, by_class in runs:
        left_open[axis.place(moment)] = dict(by_class)
        seen.add(axis.place(moment))
    most = max(sum(bucket.values()) for bucket in left_open)
    bottom = _ROWS_TOP + _ROWS_HEIGHT
    clean = [place for place in sorted(seen) if not any(left_open[place].values())]
    texts = ["a run, nothing open" if place in clean else _stack_text(left_open[place]) for place in range(axis.bins)]
    parts = [
        _lane(f"open findings after the last run of each {_span(width)}", _ROWS_TOP, _ROWS_HEIGHT, most),
        _path("clean", [_bar(axis, place, bottom, 0.0) for place in clean]),
        *_stacks(axis, left_open, bottom, _ROWS_HEIGHT),
        *_titles(axis, _ROWS_HEIGHT, texts),
        *_ticks(axis, bottom + 22),
    ]
    return _figure("Open findings over the runs", bottom + 32, parts, left_open)


def _figure(title: str, height: float, parts: list[str], stacks: list[dict[str, int]]) -> str:
    names = [name.value for name in FAULTS if any(bucket.get(name.value) for bucket in stacks)]
    legend = "".join(f"<span><i class='mark c-{name}'></i>{name}</span>" for name in names)
    return (
        f"<figure><svg viewBox='0 0 {_WIDTH:g} {height:g}' role='img' aria-label='{title}'>"
        f"{''.join(parts)}</svg><figcaption>{legend or 'no findings'}</figcaption></figure>"
    )


def _span(seconds: float) -> str:
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size and seconds % size == 0:
            return f"{seconds / size:g} {unit}"
    return f"{seconds:g} s"


def _lane(title: str, top: float, height: float, most: int) -> str:
    bottom = top + height
    return (
        f"<text class='lane' x='{_LEFT:g}' y='{top - 9:g}'>{title}</text>"
        f"<line class='grid' x1='{_LEFT:g}' x2='{_WIDTH - _RIGHT:g}' y1='{top:g}' y2='{top:g}'/>"
        f"<line class='axis' x1='{_LEFT:g}' x2='{_WIDTH - _RIGHT:g}' y1='{bottom:g}' y2='{bottom:g}'/>"
        f"<text class='tick end' x='{_LEFT - 8:g}' y='{top + 4:g}'>{most:,}</text>"
        f"<text class='tick end' x='{_LEFT - 8:g}' y='{bottom + 4:g}'>0</text>"
    )


def _bars(axis: _Axis, rows: list[int]) -> list[str]:
    most = max(max(rows), 1)
    bars = [
        _bar(axis, place, _ROWS_TOP + _ROWS_HEIGHT, _ROWS_HEIGHT * count / most)
        for place, count in enumerate(rows)
        if count
    ]
    return [_path("rows", bars)]


def _stacks(axis: _Axis, found: list[dict[str, int]], bottom: float, height: float) -> list[str]:
    most = max(1, *(sum(bucket.values()) for bucket in found))
    bars: dict[str, list[str]] = {name.value: [] for name in FAULTS}
    for place, bucket in enumerate(found):
        below = bottom
        for name, drawn in bars.items():
            if bucket.get(name):
                drawn.append(_bar(axis, place, below, height * bucket[name] / most))
                below -= height * bucket[name] / most
    return [_path(f"c-{name}", drawn) for name, drawn in bars.items()]


def _stack_text(bucket: Mapping[str, int]) -> str:
    """The largest classes of a bucket with their counts."""
    largest = sorted((name for name in bucket if bucket[name]), key=lambda name: -bucket[name])
    texts = [f"{bucket[name]:,} {name}" for name in largest[:_NAMED]]
    return ", ".join([*texts, "…"] if len(largest) > _NAMED else texts)


def _bar(axis: _Axis, place: int, bottom: float, height: float) -> str:
    """A bar as a part of a path. One path per class is several times shorter than one rectangle per bar."""
    begin = axis.x(place)
    numbers = (begin + 1, bottom, max(height, 1.5), axis.x(place + 1) - begin - 2)
    x, y, tall, wide = (f"{round(number, 1):g}" for number in numbers)
    return f"M{x} {y}v-{tall}h{wide}v{tall}z"


def _path(css: str, bars: Sequence[str]) -> str:
    return f"<path class='{css}' d='{''.join(bars)}'/>" if bars else ""


def _titles(axis: _Axis, height: float, texts: Sequence[str]) -> list[str]:
    """Invisible rectangles over the bars of all lanes. A browser shows the text of the rectangle under the pointer."""
    width = axis.x(1) - axis.x(0)
    return [
        f"<rect class='over' x='{axis.x(place):.1f}' y='{_ROWS_TOP:g}' width='{width:.1f}' height='{height:g}'>"
        f"<title>{_when(axis, place)}: {text}</title></rect>"
        for place, text in enumerate(texts)
        if text
    ]


def _when(axis: _Axis, place: int) -> str:
    return f"{datetime.fromtimestamp(axis.low + axis.width * place, UTC):%Y-%m-%d %H:%M:%S}"


def _ticks(axis: _Axis, y: float) -> list[str]:
    span = axis.width * axis.bins
    form = "%H:%M:%S" if span < 3600 else ("%m-%d %H:%M" if span < 14 * 86400 else "%Y-%m-%d")
    labels = []
    for place in range(0, axis.bins + 1, math.ceil(axis.bins / _TICKS)):
        moment = datetime.fromtimestamp(axis.low + axis.width * place, UTC)
        anchor = "tick" if place == 0 else ("tick end" if place == axis.bins else "tick mid")
        labels.append(f"<text class='{anchor}' x='{axis.x(place):.1f}' y='{y:g}'>{moment.strftime(form)}</text>")
    return labels
