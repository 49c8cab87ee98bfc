"""Sends end messages on a thread, because RocketMQ's client has only blocking calls.

If an end message is lost, check-back decides its transaction.

Each process has one such thread, which starts at the first end message of the process, also in a forked process. The
queue of the thread has a limit. End messages over this limit are dropped, and check-back decides their transactions.
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
from outbox.utils.safe_text import printable

logger = logging.getLogger(__name__)

MAX_QUEUED: Final = 10_000
MAX_BATCH: Final = 500


class FlushingThread:
    """Calls `send` with end messages on a daemon thread, because `send` may block. All methods are thread-safe."""

    def __init__(self, send: Callable[[Sequence[EndTransaction]], object]) -> None:
        self._send = send
        self.dropped = 0
        self._reset()
        os.register_at_fork(after_in_child=self._reset)

    def _reset(self) -> None:
        """Make an empty queue, at the start and after a fork.

        A forked child process does not have the parent's thread, and the parent sends the messages that it has queued.
        """
        # Do not use a queue.Queue here, because gevent replaces that class by a class on which a thread cannot wait.
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
                logger.warning(
                    "%d end messages were dropped since the start, because the queue is full; check-back will decide "
                    "their transactions",
                    self.dropped,
                )
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
                # The interpreter is shutting down. The queued messages are lost, and check-back decides their
                # transactions.
                logger.info(
                    "the flusher thread cannot be started any more, check-back will decide the queued transactions"
                )
                return
            self._thread = thread

    def flush(self, *, within_seconds: float) -> bool:
        """Wait until all end messages before this call are sent or given up.

        Return False if the wait is longer than `within_seconds`.
        """
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
                logger.warning(
                    "%d end messages were not sent, check-back will decide their transactions: %s", len(ends), error
                )
            except Exception as error:
                logger.error(
                    "the flusher failed; check-back will decide the transactions of %d end messages",
                    len(ends),
                    exc_info=printable(error),
                )
            with self._changed:
                self._unfinished -= len(ends)
                self._changed.notify_all()

    def _take(self) -> list[EndTransaction]:
        """Wait for an end message, then remove up to MAX_BATCH messages from the queue and return them."""
        with self._changed:
            while not self._queue:
                self._changed.wait()
            return [self._queue.popleft() for _ in range(min(len(self._queue), MAX_BATCH))]
