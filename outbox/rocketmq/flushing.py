"""Sends end messages on a thread, because RocketMQ's client has only blocking calls. A lost end message is harmless.

Each process has one such thread. It starts at the first end message after the process has started or forked. Its queue
is bounded, and end messages beyond the bound are dropped. Check-back then settles their transactions.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final

from outbox.errors import BrokerError
from outbox.transaction import EndTransaction
from outbox.utils.faults import point

logger = logging.getLogger(__name__)

MAX_QUEUED: Final = 10_000
MAX_BATCH: Final = 500


class FlushingThread:
    """Passes end messages to `send`, which may block, on a daemon thread. All methods are thread-safe."""

    def __init__(self, send: Callable[[Sequence[EndTransaction]], object]) -> None:
        self._send = send
        self.dropped = 0
        self._reset()
        os.register_at_fork(after_in_child=self._reset)

    def _reset(self) -> None:
        """Start with an empty queue, also after a fork.

        The child process does not have the parent's thread, and the parent sends its own messages.
        """
        # This is not a queue.Queue, because gevent replaces that class by a class on which a thread cannot wait.
        self._queue: deque[EndTransaction] = deque()
        self._changed = threading.Condition()
        # The number of end messages that are queued, or taken from the queue and not sent yet.
        self._unfinished = 0
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def put(self, end: EndTransaction) -> None:
        """Queue an end message and return at once."""
        with self._changed:
            if fits := len(self._queue) < MAX_QUEUED:
                self._queue.append(end)
                self._unfinished += 1
                self._changed.notify_all()
        if not fits:
            self.dropped += 1
            if self.dropped % MAX_QUEUED == 1:
                logger.warning("%d end messages dropped so far, check-back will settle them", self.dropped)
        if self._thread is None or not self._thread.is_alive():
            self._start()

    def _start(self) -> None:
        with self._lock:
            if self._thread is not None and self._thread.is_alive():
                return
            thread = threading.Thread(target=self._run, name="outbox-flusher", daemon=True)
            try:
                thread.start()
            except RuntimeError:
                # The interpreter is shutting down. The messages are lost, and check-back settles their transactions.
                logger.info(
                    "the flusher thread cannot be started any more, check-back will settle the queued transactions"
                )
                return
            self._thread = thread

    def flush(self, *, within_seconds: float) -> bool:
        """Wait until all earlier end messages are sent or given up. Return False if the time runs out first."""
        deadline = time.monotonic() + within_seconds
        with self._changed:
            while self._unfinished:
                left = deadline - time.monotonic()
                if left <= 0 or self._thread is None or not self._thread.is_alive():
                    return False
                self._changed.wait(left)
        return True

    def _run(self) -> None:
        while True:
            ends = self._take()
            try:
                point("producer.before_end")
                self._send(ends)
                point("producer.after_end")
            except BrokerError as error:
                logger.warning("%d end messages were not sent, check-back will settle them: %s", len(ends), error)
            except Exception:
                logger.exception("the flusher failed; check-back will settle %d end messages", len(ends))
            with self._changed:
                self._unfinished -= len(ends)
                self._changed.notify_all()

    def _take(self) -> list[EndTransaction]:
        """Wait for an end message, then take all queued messages up to the batch limit."""
        with self._changed:
            while not self._queue:
                self._changed.wait()
            return [self._queue.popleft() for _ in range(min(len(self._queue), MAX_BATCH))]
