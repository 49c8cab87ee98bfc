"""Measure what the table of goals needs, in about 25 minutes for five rounds, and store it in benchmarks/results.

    python -m benchmarks.web_peers --install            once: the peers' environments
    python -m benchmarks.goals                          five rounds of the parts web, bulk and memory
    python -m benchmarks.goals --part age --rounds 1    a snapshot held for ten minutes, on both paths
    python -m benchmarks.goals --slowed                 the same beside busy neighbours (benchmarks.slowed)
    python -m benchmarks.tables                         print the stored figures into the documents

The ways of a part run in turn within each round. The files are written after each part of a round, so an interruption
loses only the part that is running. `--part` measures some parts only, and leaves the files of the others.
OUTBOX_BENCH_TRANSACTIONS, OUTBOX_BENCH_LATENCY_SECONDS, OUTBOX_BENCH_PAIRS, OUTBOX_BENCH_MESSAGES and
OUTBOX_BENCH_HELD_SECONDS set the sizes.
Nothing else should be running.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Sequence

from benchmarks import results, slowed, tables
from benchmarks.goal_parts import PARTS, SIZES, WAYS, Values, raw_notify
from benchmarks.harness import server
from benchmarks.peers.run import MEASURING


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--slowed", action="store_true", help=f"beside busy neighbours; as {slowed.VARIABLE}=1")
    parser.add_argument("--part", action="append", choices=PARTS, help="only this part (repeatable)")
    options = parser.parse_args()
    if options.slowed:
        os.environ[slowed.VARIABLE] = "1"
    os.environ["PGAPPNAME"] = MEASURING
    for way in WAYS:
        if way.left_out():
            print(f"left out: {way.name}: {way.left_out()}")
    with slowed.if_wanted():
        measure(options.part or [part for part in PARTS if part != "age"], options.rounds)
    print(f"\n{tables.goals_text()}\npython -m benchmarks.tables writes these figures into the documents")


def measure(parts: Sequence[str], rounds: int) -> None:
    found: dict[str, list[Values]] = {part: [] for part in parts}
    with server() as url:
        speed = raw_notify(url)
        print(f"raw NOTIFY: {speed:,.0f} messages/s", flush=True)
        for run in range(rounds):
            for part in parts:
                started = time.monotonic()
                print(f"round {run + 1} of {rounds}, {part}", flush=True)
                found[part].append(PARTS[part](url, run))
                results.store_rounds(f"goals_{part}", found[part], raw_notify=speed, n=SIZES[part])
                print(f"  {time.monotonic() - started:.0f} s", flush=True)


if __name__ == "__main__":
    main()
