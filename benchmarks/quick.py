"""The web job of this project and of its peers in about five minutes, as a table and as a picture (SVG).

    make bench-quick                                    install the peers, measure, write var/bench-quick.svg
    python -m benchmarks.quick [--svg FILE] [--way TEXT]

It is `benchmarks.web_peers` with three rounds, 2,000 transactions, and four threads at 300 transactions a second.
Nothing else should be running.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

DEFAULTS = {
    "OUTBOX_BENCH_REPEATS": "3",
    "OUTBOX_BENCH_TRANSACTIONS": "2000",
    "OUTBOX_BENCH_LATENCY_SECONDS": "3",
    "OUTBOX_BENCH_LATENCY_THREADS": "4",
}
PICTURE = Path("var/bench-quick.svg")


@dataclass(frozen=True)
class Bar:
    """One way: a median with the lowest and the highest value."""

    name: str
    median: float
    low: float
    high: float


@dataclass(frozen=True)
class Chart:
    """A title with its unit, and one bar per way."""

    title: str
    bars: Sequence[Bar]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--svg", type=Path, default=PICTURE, help=f"the picture (default {PICTURE})")
    parser.add_argument("--way", action="append", default=[], help="only ways whose name contains this (repeatable)")
    options = parser.parse_args()
    for name, value in DEFAULTS.items():
        os.environ.setdefault(name, value)
    # These modules read the variables when they are imported.
    from benchmarks import web_peers
    from benchmarks.harness import REPEATS, Spread, percentile
    from benchmarks.peers import ways
    from benchmarks.peers.run import MEASURING

    os.environ["PGAPPNAME"] = MEASURING
    quick = (*ways.OURS, ways.RELIABLE, ways.RELIABLE_INBOX, ways.RAW)
    results = web_peers.measure(web_peers.possible(quick, options.way))
    web_peers.throughput(results, versions=False)
    web_peers.latency(results)

    def bar(name: str, spread: Spread) -> Bar:
        return Bar(name, spread.median, spread.low, spread.high)

    rates = [bar(way.name, Spread.of([job.rate for job in found.jobs])) for way, found in results.items()]
    waits = [
        bar(way.name, Spread.of([percentile(job.latencies(after_seconds=0.5), 0.5) for job in found.steady]))
        for way, found in results.items()
    ]
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    options.svg.parent.mkdir(parents=True, exist_ok=True)
    options.svg.write_text(
        svg(
            [
                Chart("web job, four threads, end to end: messages/s (more is better)", rates),
                Chart("commit to handler at 300/s, p50: milliseconds (less is better)", waits),
            ],
            f"{cores} cores, commits wait for the disk, medians of {REPEATS} rounds; lines: low to high",
        ),
        encoding="utf-8",
    )
    print(f"\nthe picture is {options.svg}")


# -- the picture -----------------------------------------------------------------------------------

_WIDTH, _NAMES, _ROW = 760, 240, 24
_OURS, _OTHERS = "#2563eb", "#94a3b8"


def svg(charts: Sequence[Chart], note: str) -> str:
    """Return horizontal bars with a line from the lowest to the highest value. The background is white."""
    parts: list[str] = []
    top = 28
    for chart in charts:
        parts.append(_text(10, top, chart.title, bold=True))
        longest = max(bar.high for bar in chart.bars)
        scale = (_WIDTH - _NAMES - 90) / longest if longest else 0.0
        for bar in chart.bars:
            top += _ROW
            colour = _OURS if bar.name.startswith("this project") else _OTHERS
            middle = top - 5
            parts += [
                _text(_NAMES - 10, top, bar.name, anchor="end"),
                f'<rect x="{_NAMES}" y="{top - 14}" width="{bar.median * scale:.1f}" height="18" fill="{colour}"/>',
                f'<path d="M{_NAMES + bar.low * scale:.1f} {middle}H{_NAMES + bar.high * scale:.1f}" stroke="black"/>',
                _text(_NAMES + bar.high * scale + 8, top, _number(bar.median)),
            ]
        top += 2 * _ROW
    parts.append(_text(10, top, note))
    height = top + 16
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" role="img" '
        f'font-family="sans-serif" font-size="13"><rect width="100%" height="100%" fill="white"/>'
        f"{''.join(parts)}</svg>\n"
    )


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.2f}"


def _text(x: float, y: float, text: str, *, anchor: str = "start", bold: bool = False) -> str:
    weight = ' font-weight="bold"' if bold else ""
    return f'<text x="{x:.1f}" y="{y}" text-anchor="{anchor}"{weight} fill="#0f172a">{escape(text)}</text>'


if __name__ == "__main__":
    main()
