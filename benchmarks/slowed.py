"""A slowed machine: with OUTBOX_BENCH_SLOWED=1, a busy neighbour competes for each core while a benchmark runs.

A neighbour is a process that computes without a pause. It is pinned to one core and has the usual priority, so the
scheduler gives it half of the core whenever one other process wants to run there.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator

VARIABLE = "OUTBOX_BENCH_SLOWED"
HOW = "one busy process pinned to each core, of the usual priority (SCHED_OTHER, nice 0)"
# It ends by itself if its parent is killed.
_BUSY = """
import os, sys
os.sched_setaffinity(0, {int(sys.argv[1])})
parent = int(sys.argv[2])
while os.getppid() == parent:
    for _ in range(1_000_000):
        pass
"""


def wanted() -> bool:
    return os.environ.get(VARIABLE, "") not in ("", "0")


@contextlib.contextmanager
def if_wanted() -> Iterator[list[int]]:
    """Run the block beside the neighbours, if the variable asks for them; their process ids."""
    neighbours: list[subprocess.Popen[bytes]] = []
    try:
        for core in sorted(os.sched_getaffinity(0)) if wanted() else ():
            command = [sys.executable, "-S", "-c", _BUSY, str(core), str(os.getpid())]
            neighbours.append(subprocess.Popen(command, stdin=subprocess.DEVNULL))
        yield [neighbour.pid for neighbour in neighbours]
    finally:
        for neighbour in neighbours:
            neighbour.kill()
            neighbour.wait()
