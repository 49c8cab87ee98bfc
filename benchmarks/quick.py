"""The web job of this project, of its peers and of the least log in eight minutes, as a table and as a picture (SVG).

    make bench-quick                                    install the peers, measure, write var/bench-quick.svg
    python -m benchmarks.quick [--svg FILE] [--way TEXT]

Each way runs 2,000 transactions as fast as it can, then 300 a second for three seconds from four threads, then the
same for thirty seconds beside a snapshot that another transaction holds, as a report or a backup does. Nothing else
should be running. OUTBOX_BENCH_REPEATS is the number of rounds.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Sequence
from functools import partial
from html import escape
from pathlib import Path
from typing import Final, NamedTuple

ROUNDS: Final = 2
TRANSACTIONS: Final = 2_000
STEADY_SECONDS: Final = 3
HELD_SECONDS: Final = 30
# Of the seconds with a held snapshot, only the last ones count: until then, dead rows gather.
LAST_SECONDS: Final = 5
THREADS: Final = 4
PICTURE: Final = Path("var/bench-quick.svg")


class Bar(NamedTuple):
    """One way: a median with the lowest and the highest value."""

    name: str
    median: float
    low: float
    high: float


class Chart(NamedTuple):
    """A title with its unit, and one bar per way."""

    title: str
    bars: Sequence[Bar]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--svg", type=Path, default=PICTURE, help=f"the picture (default {PICTURE})")
    parser.add_argument("--way", action="append", default=[], help="only ways whose name contains this (repeatable)")
    options = parser.parse_args()
    # The harness reads the variable when it is imported.
    os.environ.setdefault("OUTBOX_BENCH_REPEATS", str(ROUNDS))
    from benchmarks.harness import REPEATS, Spread, percentile, server, table
    from benchmarks.peers import ways
    from benchmarks.peers.run import MEASURING, Job, running
    from benchmarks.web_peers import RATE_PER_SECOND, possible

    os.environ["PGAPPNAME"] = MEASURING
    quick = (ways.ATOMIC_INBOX, ways.TWO_PHASE_INBOX, ways.RELIABLE_INBOX, ways.RAW, ways.FLOOR_LOG)
    chosen = possible(quick, options.way)
    full: dict[str, list[Job]] = {way.name: [] for way in chosen}
    steady: dict[str, list[Job]] = {way.name: [] for way in chosen}
    held: dict[str, list[Job]] = {way.name: [] for way in chosen}
    with server() as url:
        for run in range(REPEATS):
            for number, way in enumerate(chosen):
                print(f"round {run + 1} of {REPEATS}: {way.name}", flush=True)
                with running(url, way, f"run_{run}_{number}") as it:
                    full[way.name].append(it.job(TRANSACTIONS))
                    at_pace = partial(it.job, threads=THREADS, per_second=RATE_PER_SECOND)
                    steady[way.name].append(at_pace(RATE_PER_SECOND * STEADY_SECONDS))
                    with it.held_snapshot():
                        held[way.name].append(at_pace(RATE_PER_SECOND * HELD_SECONDS))

    def chart(title: str, jobs: dict[str, list[Job]], value: Callable[[Job], float]) -> Chart:
        spreads = {name: Spread.of([value(job) for job in found]) for name, found in jobs.items()}
        return Chart(title, [Bar(name, one.median, one.low, one.high) for name, one in spreads.items()])

    def wait(share: float, after_seconds: float) -> Callable[[Job], float]:
        return lambda job: percentile(job.latencies(after_seconds), share)

    at_the_end = HELD_SECONDS - LAST_SECONDS
    charts = [
        chart(f"{THREADS} threads, as fast as they can: messages/s, end to end", full, lambda job: job.rate),
        chart(f"{RATE_PER_SECOND}/s: milliseconds from COMMIT to handler, p50", steady, wait(0.5, 0.5)),
        chart(f"{RATE_PER_SECOND}/s: milliseconds from COMMIT to handler, p99", steady, wait(0.99, 0.5)),
        chart(f"the same while a snapshot is held for {HELD_SECONDS} s, p99 at its end", held, wait(0.99, at_the_end)),
    ]
    for one in charts:
        rows = [[bar.name, f"{Spread(bar.median, bar.low, bar.high):,.1f}"] for bar in one.bars]
        table(one.title, ["way", "median (low to high)"], rows)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    options.svg.parent.mkdir(parents=True, exist_ok=True)
    note = f"{cores} cores, commits wait for the disk, medians of {REPEATS} rounds; lines: low to high"
    options.svg.write_text(svg(charts, note), encoding="utf-8")
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
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


def _text(x: float, y: float, text: str, *, anchor: str = "start", bold: bool = False) -> str:
    weight = ' font-weight="bold"' if bold else ""
    return f'<text x="{x:.1f}" y="{y}" text-anchor="{anchor}"{weight} fill="#0f172a">{escape(text)}</text>'


if __name__ == "__main__":
    main()
