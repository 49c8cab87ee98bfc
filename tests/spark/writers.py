"""Live writers beside a reconciliation."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from tests.spark.world import World
from tests.support import eventually


class Writers:
    """Live writer processes; `kill_one` ends one in the middle of its work and starts another."""

    def __init__(self, world: World, count: int) -> None:
        self._world, self._started = world, 0
        self._running = [self._start() for _ in range(count)]

    def _start(self) -> subprocess.Popen[bytes]:
        self._started += 1
        first = str(self._started * 10_000_000)
        arguments = [self._world.app_url, self._world.broker_url, str(self._world.topic_id), first]
        return subprocess.Popen([sys.executable, "-m", "tests.spark.live_writer", *arguments])

    def written(self) -> int:
        """Orders so far."""
        row = self._world.app.execute("SELECT count(*) FROM orders_order WHERE id > 10000000").fetchone()
        assert row is not None
        return int(row[0])

    def kill_one(self) -> None:
        """SIGKILL."""
        victim = self._running.pop(0)
        assert victim.poll() is None, "a writer ended by itself"
        victim.kill()
        victim.wait()
        self._running.append(self._start())

    def end(self) -> None:
        """SIGKILL to all."""
        for process in self._running:
            process.kill()
            process.wait()


@contextmanager
def writing(world: World, count: int = 2) -> Iterator[Writers]:
    """Writers that have written something, until the end of the block."""
    writers = Writers(world, count)
    try:
        eventually(lambda: writers.written() > 50, what="orders")
        yield writers
    finally:
        writers.end()
