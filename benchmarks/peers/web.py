"""The web process of a way, run in its peer's environment: `python -m benchmarks.peers.web [--prepare]`.

Reads jobs from its standard input, one JSON object a line, and answers each with a line when it is done. Threads stay
until the end, and their connections with them.
"""

from __future__ import annotations

import argparse
import json
import os
import struct
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

THREADS = 4
# Number, commit in ns since 1970, duration of the block in ns.
ENTRY = struct.Struct("=qqq")


@dataclass(frozen=True)
class Job:
    """Run `count` blocks from number `first` on, by `threads`; `per_second` 0 is as fast as it goes."""

    first: int
    count: int
    threads: int
    per_second: float
    plain: bool
    into: str


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--prepare", action="store_true")
    peer = import_module(f"benchmarks.peers.{os.environ['OUTBOX_BENCH_PEER']}.block")
    if parser.parse_args().prepare:
        peer.prepare()
        return
    # Set up by one thread, before any other.
    peer.block(plain=False)
    with ThreadPoolExecutor(THREADS) as pool:
        print("ready", flush=True)
        for line in sys.stdin:
            print(json.dumps(run(pool, peer.block, Job(**json.loads(line)))), flush=True)


def run(pool: ThreadPoolExecutor, blocks: Callable[..., Callable[[int], None]], job: Job) -> dict[str, int]:
    """The answer: when the first block began and when the last one had committed, in ns since 1970."""
    together = threading.Barrier(job.threads)
    share, rest = divmod(job.count, job.threads)

    def thread(number: int) -> tuple[int, list[tuple[int, int, int]]]:
        block = blocks(plain=job.plain)
        first = job.first + number * share
        count = share + (rest if number == job.threads - 1 else 0)
        together.wait()
        return time.time_ns(), paced(block, first, count, job.per_second / job.threads)

    found = list(pool.map(thread, range(job.threads)))
    entries = [entry for _, entries in found for entry in entries]
    Path(job.into).write_bytes(b"".join(ENTRY.pack(*entry) for entry in entries))
    return {"began": min(began for began, _ in found), "ended": max(at for _, at, _ in entries)}


def paced(block: Callable[[int], None], first: int, count: int, per_second: float) -> list[tuple[int, int, int]]:
    """What ENTRY holds of each block. A thread that falls behind catches up."""
    entries = []
    started = time.perf_counter()
    for number in range(count):
        if per_second:
            pause = started + number / per_second - time.perf_counter()
            if pause > 0:
                time.sleep(pause)
        began = time.perf_counter_ns()
        block(first + number)
        entries.append((first + number, time.time_ns(), time.perf_counter_ns() - began))
    return entries


if __name__ == "__main__":
    main()
