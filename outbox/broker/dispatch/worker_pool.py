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

# Calls handed to the pool beyond its threads, so that a thread that finishes one need not wait for the next.
_AHEAD_SINGLE: Final = 3
_AHEAD_BATCH: Final = 1
# Stuck threads are replaced, up to this many times the threads of the pool.
STUCK_LIMIT: Final = 4
# A thread without work for this long ends, and its database connections with it.
IDLE_SECONDS: Final = 30.0


class WorkerPool:
    """Up to `threads` threads, started when needed and ended when idle. One dispatching thread uses it."""

    def __init__(self, name: str, threads: int, run: Callable[[HandlerCall], None], *, batches: bool) -> None:
        self._name = name
        self._threads = threads
        self._run = run
        self._capacity = threads * (1 + (_AHEAD_BATCH if batches else _AHEAD_SINGLE))
        self._queue: SimpleQueue[HandlerCall | None] = SimpleQueue()
        self._started: list[threading.Thread] = []
        self._numbers = itertools.count(1)
        # Held by an idle thread that ends, and by the dispatching thread while it checks the number of threads.
        self._staffing = threading.Lock()
        # Threads that take calls, threads given up while they run one, and submitted calls that are not over.
        self._working = 0
        self._stuck = 0
        self._in_hand = 0

    @property
    def room(self) -> int:
        """The number of calls that it accepts now."""
        return 0 if self.frozen else self._capacity - self._in_hand

    @property
    def frozen(self) -> bool:
        """Whether too many handlers are stuck to start more threads: waiting calls are not begun."""
        return self._stuck > self._threads * STUCK_LIMIT

    @property
    def waiting(self) -> int:
        """The number of calls that no thread has taken yet. Any thread."""
        return self._queue.qsize()

    @property
    def in_hand(self) -> int:
        """The number of submitted calls that are not over."""
        return self._in_hand

    def submit(self, work: HandlerCall) -> None:
        """Run a call as soon as a thread is free."""
        self.reserve()
        self.start(work)

    def reserve(self) -> None:
        """Count a call as submitted; it is started later, or `collected` without a start."""
        self._in_hand += 1

    def start(self, work: HandlerCall) -> None:
        """Run a reserved call."""
        self._queue.put(work)
        self._staff()

    def withdraw(self) -> list[HandlerCall]:
        """Return the submitted calls that no thread has taken."""
        waiting: list[HandlerCall] = []
        with contextlib.suppress(Empty):
            while (work := self._queue.get_nowait()) is not None:
                waiting.append(work)
        return waiting

    def collected(self) -> None:
        """Record that a submitted call is over."""
        self._in_hand -= 1

    def replace_stuck(self) -> None:
        """Replace the thread of a call that is given up while it still runs."""
        self._in_hand -= 1
        with self._staffing:
            self._working -= 1
        self._stuck += 1
        if self.frozen:
            logger.error("%s: %d handlers are stuck; no more threads are started for it", self._name, self._stuck)
        self._staff()

    def unstuck(self) -> None:
        """Record that a given-up call has returned; its thread ends."""
        self._stuck -= 1
        self._staff()

    def stop(self, *, within_seconds: float) -> None:
        """End the threads; those stuck in a handler stay behind as daemons."""
        for _ in self._started:
            self._queue.put(None)
        deadline = time.monotonic() + within_seconds
        for thread in self._started:
            thread.join(max(0.0, deadline - time.monotonic()) if not self._stuck else 0.1)

    def _staff(self) -> None:
        """Start the threads that the submitted calls need, within the limit for stuck ones."""
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
        """Return the next call; None when the pool stops, or when the thread has been idle for too long."""
        while True:
            with contextlib.suppress(Empty):
                return self._queue.get(timeout=IDLE_SECONDS)
            with self._staffing:
                # A call that is submitted later finds one thread less, and starts another.
                if self._queue.empty():
                    self._working -= 1
                    return None
