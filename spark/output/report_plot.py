"""The timeline of the report: rows per bucket of time, and the findings among them, as inline SVG."""

from __future__ import annotations

import math
from datetime import UTC, datetime
from itertools import pairwise
from typing import Final

from ..comparison import classify

Times = list[tuple[str, float, int]]
"""Class, seconds since 1970, count."""

BINS: Final = 60
_WIDTH, _LEFT, _RIGHT = 1080.0, 64.0, 10.0
_ROWS_TOP, _ROWS_HEIGHT = 26.0, 90.0
_FOUND_TOP, _FOUND_HEIGHT = 146.0, 90.0
_HEIGHT: Final = 268.0
_TICKS: Final = 6


def plot(volume: list[tuple[float, int]], times: Times) -> str:
    """The section with the plot; empty when nothing has a time."""
    moments = [moment for moment, _ in volume] + [moment for _, moment, _ in times]
    if not moments:
        return ""
    low, high = min(moments), max(moments)
    # A whole number of the buckets that were counted: other widths leave gaps between the bars.
    steps = [later - sooner for (sooner, _), (later, _) in pairwise(sorted(volume)) if later > sooner]
    step = min(steps, default=1.0)
    width = step * max(1, math.ceil((high - low + step) / step / BINS))
    rows = [0] * BINS
    for moment, count in volume:
        rows[_bin(moment, low, width)] += count
    found: list[dict[str, int]] = [{} for _ in range(BINS)]
    for name, moment, count in times:
        bucket = found[_bin(moment, low, width)]
        bucket[name] = bucket.get(name, 0) + count
    parts = [
        _lane("rows", _ROWS_TOP, _ROWS_HEIGHT, max(rows)),
        _lane("findings", _FOUND_TOP, _FOUND_HEIGHT, max(sum(bucket.values()) for bucket in found)),
        *_bars(rows),
        *_stacks(found),
        *_axis(low, width),
    ]
    names = [name.value for name in classify.FAULTS if any(name.value in bucket for bucket in found)]
    legend = "".join(f"<span><i class='mark c-{name}'></i>{name}</span>" for name in names)
    return (
        "<section><h2>Timeline</h2><figure>"
        f"<svg viewBox='0 0 {_WIDTH:g} {_HEIGHT:g}' role='img' aria-label='Rows and findings over time'>"
        f"{''.join(parts)}</svg><figcaption>{legend or 'no findings'}</figcaption></figure></section>"
    )


def _bin(moment: float, low: float, width: float) -> int:
    return min(BINS - 1, int((moment - low) / width))


def _x(position: float) -> float:
    return _LEFT + position * (_WIDTH - _LEFT - _RIGHT) / BINS


def _lane(title: str, top: float, height: float, most: int) -> str:
    bottom = top + height
    return (
        f"<text class='lane' x='{_LEFT:g}' y='{top - 9:g}'>{title} per bar</text>"
        f"<line class='grid' x1='{_LEFT:g}' x2='{_WIDTH - _RIGHT:g}' y1='{top:g}' y2='{top:g}'/>"
        f"<line class='axis' x1='{_LEFT:g}' x2='{_WIDTH - _RIGHT:g}' y1='{bottom:g}' y2='{bottom:g}'/>"
        f"<text class='tick end' x='{_LEFT - 8:g}' y='{top + 4:g}'>{most:,}</text>"
        f"<text class='tick end' x='{_LEFT - 8:g}' y='{bottom + 4:g}'>0</text>"
    )


def _bars(rows: list[int]) -> list[str]:
    most = max(max(rows), 1)
    return [
        _bar(place, _ROWS_TOP + _ROWS_HEIGHT, _ROWS_HEIGHT * count / most, "rows", f"{count:,} rows")
        for place, count in enumerate(rows)
        if count
    ]


def _stacks(found: list[dict[str, int]]) -> list[str]:
    most = max(1, *(sum(bucket.values()) for bucket in found))
    bars = []
    for place, bucket in enumerate(found):
        bottom = _FOUND_TOP + _FOUND_HEIGHT
        for name in classify.FAULTS:
            count = bucket.get(name.value, 0)
            if count:
                height = _FOUND_HEIGHT * count / most
                bars.append(_bar(place, bottom, height, f"c-{name.value}", f"{count:,} {name.value}"))
                bottom -= height
    return bars


def _bar(place: int, bottom: float, height: float, css: str, title: str) -> str:
    drawn = max(height, 1.5)
    return (
        f"<rect class='{css}' x='{_x(place) + 1:.1f}' y='{bottom - drawn:.1f}' width='{_x(1) - _x(0) - 2:.1f}' "
        f"height='{drawn:.1f}'><title>{title}</title></rect>"
    )


def _axis(low: float, width: float) -> list[str]:
    span = width * BINS
    form = "%H:%M:%S" if span < 3600 else ("%m-%d %H:%M" if span < 14 * 86400 else "%Y-%m-%d")
    labels = []
    for tick in range(_TICKS + 1):
        place = BINS * tick / _TICKS
        moment = datetime.fromtimestamp(low + width * place, UTC)
        anchor = "tick" if tick == 0 else ("tick end" if tick == _TICKS else "tick mid")
        labels.append(f"<text class='{anchor}' x='{_x(place):.1f}' y='{_HEIGHT - 10:g}'>{moment.strftime(form)}</text>")
    return labels
