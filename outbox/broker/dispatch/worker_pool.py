"""The threads that call a subscription's handler."""

from __future__ import annotations

import contextlib
import itertools
import logging
import threading
import time
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Final

from outbox.broker.dispatch.work import HandlerCall

logger = logging.getLogger(__name__)

# Works handed to the pool beyond its threads, so that a thread that finishes one need not wait for the next.
_AHEAD_SINGLE: Final = 3
_AHEAD_BATCH: Final = 1
# Stuck handlers get their threads replaced, up to this many times the threads of the pool.
STUCK_LIMIT: Final = 4
# A thread that had no work for this long ends, and its database connections with it.
IDLE_SECONDS: Final = 30.0


class WorkerPool:
    """Up to `threads` threads, started as they are needed, ended when they are not. Used by one dispatching thread."""

    def __init__(self, name: str, threads: int, run: Callable[[HandlerCall], None], *, batches: bool) -> None:
        self._name = name
        self._threads = threads
        self._run = run
        self._capacity = threads * (1 + (_AHEAD_BATCH if batches else _AHEAD_SINGLE))
        self._queue: SimpleQueue[HandlerCall | None] = SimpleQueue()
        self._started: list[threading.Thread] = []
        self._numbers = itertools.count(1)
        # Held by a thread that finds nothing to do and ends, and by the one that looks whether there are enough.
        self._staffing = threading.Lock()
        # Threads that take works, those given up while they run one, and works submitted that are not over.
        self._working = 0
        self._stuck = 0
        self._in_hand = 0

    @property
    def room(self) -> int:
        """How many more works it takes now."""
        return 0 if self.frozen else self._capacity - self._in_hand

    @property
    def frozen(self) -> bool:
        """Whether too many handlers are stuck for more threads to be started: what it has in hand is not begun."""
        return self._stuck > self._threads * STUCK_LIMIT

    @property
    def waiting(self) -> int:
        """How many works no thread has taken yet. Any thread."""
        return self._queue.qsize()

    @property
    def in_hand(self) -> int:
        """How many works were submitted and are not over."""
        return self._in_hand

    def submit(self, work: HandlerCall) -> None:
        """Run a work as soon as a thread is free."""
        self.reserve()
        self.start(work)

    def reserve(self) -> None:
        """A work counts as submitted; it is started later, or `collected` without that."""
        self._in_hand += 1

    def start(self, work: HandlerCall) -> None:
        """Run a work that was reserved for."""
        self._queue.put(work)
        self._staff()

    def withdraw(self) -> list[HandlerCall]:
        """Works that were submitted and that no thread has taken."""
        waiting: list[HandlerCall] = []
        with contextlib.suppress(Empty):
            while (work := self._queue.get_nowait()) is not None:
                waiting.append(work)
        return waiting

    def collected(self) -> None:
        """A work that was submitted is over."""
        self._in_hand -= 1

    def replace_stuck(self) -> None:
        """A work is given up while its thread still runs it: another thread takes its place."""
        self._in_hand -= 1
        with self._staffing:
            self._working -= 1
        self._stuck += 1
        if self.frozen:
            logger.error("%s: %d handlers are stuck; no more threads are started for it", self._name, self._stuck)
        self._staff()

    def unstuck(self) -> None:
        """A given-up work has returned after all; its thread ends."""
        self._stuck -= 1
        self._staff()

    def stop(self, *, within_seconds: float) -> None:
        """End the threads; those stuck in a handler are left behind as daemons."""
        for _ in self._started:
            self._queue.put(None)
        deadline = time.monotonic() + within_seconds
        for thread in self._started:
            thread.join(max(0.0, deadline - time.monotonic()) if not self._stuck else 0.1)

    def _staff(self) -> None:
        """Start the threads that the works in hand need, as far as stuck ones allow."""
        with self._staffing:
            while self._working < min(self._in_hand, self._threads) and not self.frozen:
                self._working += 1
                name = f"{self._name}-{next(self._numbers)}"
                thread = threading.Thread(target=self._loop, name=name, daemon=True)
                self._started = [*(known for known in self._started if known.is_alive()), thread]
                thread.start()

    def _loop(self) -> None:
        while (work := self._next()) is not None:
            self._run(work)
            if work.abandoned:
                return

    def _next(self) -> HandlerCall | None:
        """The next work; None where the pool stops, or where there is none for so long that the thread ends."""
        while True:
            with contextlib.suppress(Empty):
                return self._queue.get(timeout=IDLE_SECONDS)
            with self._staffing:
                # What is put later finds one thread less, and starts another.
                if self._queue.empty():
                    self._working -= 1
                    return None
