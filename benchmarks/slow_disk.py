"""A disk of 2 ms per sync: latency from the local commit's return to the handler, and what publish adds to its block.

One thread at a low rate, first blocks without publish, then with; this project and its peers (`benchmarks.web_peers`).
OUTBOX_SLOW_DISK_MS sets the delay, OUTBOX_BENCH_LATENCY_SECONDS the length of each part.
"""

from __future__ import annotations

import argparse
import os
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import psycopg

from benchmarks import processes
from benchmarks.harness import REPEATS, Spread, percentile, table
from benchmarks.peers import ways
from benchmarks.peers.run import MEASURING, Job, Running, running
from benchmarks.peers.ways import Way
from benchmarks.slow_server import SlowServer, compiler, slow_server
from benchmarks.web_peers import possible

DELAY_MS = float(os.environ.get("OUTBOX_SLOW_DISK_MS", "2"))
RATE_PER_SECOND = 100
SECONDS = float(os.environ.get("OUTBOX_BENCH_LATENCY_SECONDS", "3"))
WAYS = (ways.ATOMIC, ways.TWO_PHASE, *(way for way in ways.PEERS if not way.inbox), ways.RAW)


@dataclass(frozen=True)
class Part:
    """Blocks of one kind, and how often sessions of the web process, and all of the server, waited for the disk."""

    job: Job
    web_syncs: int
    all_syncs: int

    @property
    def block_ms(self) -> float:
        """The median."""
        return statistics.median(self.job.blocks.values()) / 1e6

    def per_block(self, syncs: int) -> float:
        return syncs / len(self.job.blocks)


@dataclass
class Results:
    """Of one way, blocks without and with publish in each round."""

    plain: list[Part] = field(default_factory=list)
    publishing: list[Part] = field(default_factory=list)

    def rounds(self, value: Callable[[Part, Part], float]) -> Spread:
        return Spread.of([value(*parts) for parts in zip(self.plain, self.publishing, strict=True)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--way", action="append", default=[], help="only ways whose name contains this (repeatable)")
    chosen = possible(WAYS, parser.parse_args().way)
    if compiler() is None:
        print("left out: slow_disk: there is no C compiler (cc) on the PATH, which builds benchmarks/slow_disk.c")
        return
    os.environ["PGAPPNAME"] = MEASURING
    print(f"\nslow_disk: {DELAY_MS:g} ms per sync, {RATE_PER_SECOND}/s for {SECONDS:g} s, {REPEATS} rounds; medians")
    results = {way: Results() for way in chosen}
    with slow_server(DELAY_MS) as server:
        for run in range(REPEATS):
            for number, way in enumerate(chosen):
                with running(server.url, way, f"run_{run}_{number}") as it:
                    results[way].plain.append(part(server, it, plain=True))
                    results[way].publishing.append(part(server, it, plain=False))
    show(results)


def part(server: SlowServer, it: Running, *, plain: bool) -> Part:
    with psycopg.connect(it.application, autocommit=True) as connection:
        of_web = [pid for pid, name in processes.sessions(connection).items() if name == "bench-web"]
        before = server.syncs(*of_web), server.syncs()
        job = it.job(round(RATE_PER_SECOND * SECONDS), threads=1, per_second=RATE_PER_SECOND, plain=plain)
        after = server.syncs(*of_web), server.syncs()
    return Part(job, after[0] - before[0], after[1] - before[1])


def show(results: dict[Way, Results]) -> None:
    table(
        f"milliseconds from commit to handler at {RATE_PER_SECOND}/s, one thread",
        ["way", "p50", "p95", "p99"],
        [[way.name, *_latencies([part.job for part in found.publishing])] for way, found in results.items()],
    )
    table(
        "what publish adds to its block",
        [
            *("way", "block without, ms", "with, ms", "added, ms", "its syncs without", "its syncs with"),
            "all syncs/message",
        ],
        [
            [
                way.name,
                f"{found.rounds(lambda plain, _: plain.block_ms):.2f}",
                f"{found.rounds(lambda _, publishing: publishing.block_ms):.2f}",
                f"{found.rounds(lambda plain, publishing: publishing.block_ms - plain.block_ms):.2f}",
                f"{found.rounds(lambda plain, _: plain.per_block(plain.web_syncs)):.2f}",
                f"{found.rounds(lambda _, publishing: publishing.per_block(publishing.web_syncs)):.2f}",
                f"{found.rounds(lambda _, publishing: publishing.per_block(publishing.all_syncs)):.2f}",
            ]
            for way, found in results.items()
        ],
    )


def _latencies(jobs: Sequence[Job]) -> list[str]:
    runs = [job.latencies(after_seconds=0.5) for job in jobs]
    return [f"{Spread.of([percentile(run, share) for run in runs]):.2f}" for share in (0.5, 0.95, 0.99)]


if __name__ == "__main__":
    main()
