"""The same web job by this project and by its peers: rate, commits, WAL and CPU by role, then latency at a steady rate.

Four threads of one process write a row and publish a message per transaction; the worker runs as its users start it.
Rounds are interleaved: each runs every way once.

    python -m benchmarks.web_peers --install            make the peers' environments, under var/peers
    python -m benchmarks.web_peers [--way TEXT]         all ways, or those whose name contains a text
    python -m benchmarks.web_peers --before CHECKOUT    this project alone, compared with another version of it

OUTBOX_BENCH_TRANSACTIONS, OUTBOX_BENCH_LATENCY_SECONDS and OUTBOX_BENCH_REPEATS make it longer or shorter.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.harness import REPEATS, Spread, percentile, server, table
from benchmarks.peers import environments, ways
from benchmarks.peers.run import MEASURING, ROLES, Job, running
from benchmarks.peers.ways import RELIABLE, RELIABLE_INBOX, Way

TRANSACTIONS = int(os.environ.get("OUTBOX_BENCH_TRANSACTIONS", "5000"))
RATE_PER_SECOND = 300
LATENCY_SECONDS = float(os.environ.get("OUTBOX_BENCH_LATENCY_SECONDS", "5"))
# With four threads, up to four transactions commit at the same moment.
LATENCY_THREADS = int(os.environ.get("OUTBOX_BENCH_LATENCY_THREADS", "1"))
# All that happens once the web process has committed, on whosever CPU.
BEHIND = ("broker", "consumer", "parent", "worker's sessions", "the rest")


@dataclass
class Results:
    """Of one way, a job and a steady one per round."""

    jobs: list[Job] = field(default_factory=list)
    steady: list[Job] = field(default_factory=list)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--install", action="store_true", help="make the peers' environments, and end")
    parser.add_argument("--way", action="append", default=[], help="only ways whose name contains this (repeatable)")
    parser.add_argument("--before", type=Path, metavar="CHECKOUT", help="compare with another checkout of this project")
    options = parser.parse_args()
    if options.install:
        environments.install()
        return
    os.environ["PGAPPNAME"] = MEASURING
    chosen = possible(of_two_versions(options.before) if options.before else ways.EVERY, options.way)
    print(
        f"\nweb_peers: {TRANSACTIONS:,} transactions by 4 threads, then {RATE_PER_SECOND}/s for {LATENCY_SECONDS:g} s;"
    )
    print(f"{REPEATS} rounds; medians, low to high")
    results = measure(chosen)
    throughput(results, versions=options.before is not None)
    cpu("the web job", {way: found.jobs for way, found in results.items()})
    cpu(f"{RATE_PER_SECOND}/s", {way: found.steady for way, found in results.items()})
    latency(results)


def of_two_versions(checkout: Path) -> list[Way]:
    if not (checkout / "outbox").is_dir():
        raise SystemExit(f"there is no outbox in {checkout}")
    return [version for way in ways.OURS for version in (way, ways.before(way, checkout))]


def possible(wanted: Sequence[Way], texts: Sequence[str]) -> list[Way]:
    """Those that can be run here; the others are named."""
    chosen = [way for way in wanted if not texts or any(text in way.name for text in texts)]
    if not chosen:
        raise SystemExit(f"no way is called like {', '.join(texts)}; there are: {', '.join(w.name for w in wanted)}")
    for way in chosen:
        if way.left_out():
            print(f"left out: {way.name}: {way.left_out()}")
    return [way for way in chosen if not way.left_out()]


def measure(chosen: Sequence[Way]) -> dict[Way, Results]:
    results = {way: Results() for way in chosen}
    with server() as url:
        for run in range(REPEATS):
            for number, way in enumerate(chosen):
                with running(url, way, f"run_{run}_{number}") as it:
                    results[way].jobs.append(it.job(TRANSACTIONS))
                    count = round(RATE_PER_SECOND * LATENCY_SECONDS)
                    results[way].steady.append(it.job(count, threads=LATENCY_THREADS, per_second=RATE_PER_SECOND))
    return results


def throughput(results: dict[Way, Results], *, versions: bool) -> None:
    """Rates, each with the rate it is compared with in the same round."""
    peer = "the version before" if versions else "django-reliable-outbox"
    table(
        "web job, end to end: from the first block's begin to the last handler's",
        ["way", "messages/s", f"ratio to {peer}", "commits/message", "WAL bytes/message"],
        [
            [
                way.name,
                f"{Spread.of([job.rate for job in found.jobs])}",
                _ratio(found, results.get(_compared_with(way, results))),
                f"{_per_message(found.jobs, lambda job: job.usage.commits):.2f}",
                f"{_per_message(found.jobs, lambda job: job.usage.wal_bytes)}",
            ]
            for way, found in results.items()
        ],
    )


def _compared_with(way: Way, results: dict[Way, Results]) -> Way:
    """The same way before, or the peer whose handler has an inbox like this one's."""
    same = [other for other in results if other.checkout and other.name.startswith(f"{way.name}, before")]
    return same[0] if same else RELIABLE_INBOX if way.inbox else RELIABLE


def _ratio(found: Results, other: Results | None) -> str:
    if other is None:
        return "-"
    return f"{Spread.of([a.rate / b.rate for a, b in zip(found.jobs, other.jobs, strict=True)]):.2f}"


def _per_message(jobs: Sequence[Job], value: Callable[[Job], float]) -> Spread:
    return Spread.of([value(job) / len(job.handled) for job in jobs])


def cpu(what: str, jobs: dict[Way, list[Job]]) -> None:
    """The CPU by process. At a steady rate, where no work is done in batches, a message costs most."""

    def of(found: Sequence[Job], *roles: str) -> Spread:
        return _per_message(found, lambda job: sum(job.cpu[role] for role in roles) * 1e6)

    table(
        f"CPU of {what}, microseconds per message",
        ["way", *ROLES, "all behind the web process"],
        [
            [way.name, *(f"{of(found, role).median:,.0f}" for role in ROLES), f"{of(found, *BEHIND)}"]
            for way, found in jobs.items()
        ],
    )


def latency(results: dict[Way, Results]) -> None:
    rows = []
    for way, found in results.items():
        # Plans and connections are warm; the first half second is the pace finding itself.
        runs = [job.latencies(after_seconds=0.5) for job in found.steady]
        points = [f"{Spread.of([percentile(run, share) for run in runs]):.2f}" for share in (0.5, 0.95, 0.99)]
        rows.append([way.name, *points])
    threads = "one thread" if LATENCY_THREADS == 1 else f"{LATENCY_THREADS} threads"
    table(f"milliseconds from commit to handler at {RATE_PER_SECOND}/s, {threads}", ["way", "p50", "p95", "p99"], rows)


if __name__ == "__main__":
    main()
