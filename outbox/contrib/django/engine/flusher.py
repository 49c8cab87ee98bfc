"""Sends end messages and hints without blocking a request. A lost one is harmless: check-back finds the outcome.

The bundled broker takes them one way, from the calling thread. For an engine whose client only has blocking calls, a
daemon thread sends them in batches. Each process has one such thread, started at the first message after start or fork.
Its queue is bounded and drops messages beyond the bound.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Final
from uuid import UUID

from outbox.broker.postgres import PostgresBroker
from outbox.errors import BrokerError
from outbox.ports import Broker
from outbox.transaction import EndTransaction
from outbox.utils.faults import point

logger = logging.getLogger(__name__)

MAX_QUEUED: Final = 10_000
MAX_BATCH: Final = 500
_EXIT_SECONDS: Final = 2.0

# A decision, or the id of a transaction to check soon.
_Item = EndTransaction | UUID


class Flusher:
    """Sends the end messages of one process as its broker takes them. All methods are thread-safe.

    `receiver` gives the broker; `one_way` gives it only if it takes decisions one way.
    """

    def __init__(self, receiver: Callable[[], Broker], one_way: Callable[[], PostgresBroker | None]) -> None:
        self._one_way = one_way
        self._thread = FlushingThread(receiver)
        atexit.register(self.flush, within_seconds=_EXIT_SECONDS)

    def end(self, end: EndTransaction) -> None:
        """Send an end message soon; returns at once. It is dropped if too many are queued."""
        broker = self._one_way()
        if broker is None:
            self._thread.put(end)
            return
        try:
            point("producer.before_end")
            broker.end_one_way(end)
            point("producer.after_end")
        except Exception:
            logger.exception("the end of %s was not sent; check-back will settle it", end.transaction_id)

    def hint(self, transaction_id: UUID) -> None:
        """Send a hint to check soon; otherwise like `end`."""
        broker = self._one_way()
        if broker is None:
            self._thread.put(transaction_id)
        else:
            broker.hint_one_way(transaction_id)

    def flush(self, *, within_seconds: float = _EXIT_SECONDS) -> bool:
        """Wait until all earlier messages are sent or given up; False if the time ran out first."""
        deadline = time.monotonic() + within_seconds
        broker = self._one_way()
        if broker is not None and not broker.flush(within_seconds=within_seconds):
            return False
        # Include the ends that a former engine has not sent.
        return self._thread.flush(within_seconds=max(0.0, deadline - time.monotonic()))


class FlushingThread:
    """Sends end messages and hints to a broker with blocking calls, on a daemon thread. All methods are thread-safe."""

    def __init__(self, receiver: Callable[[], Broker]) -> None:
        self._receiver = receiver
        self.dropped = 0
        self._reset()
        os.register_at_fork(after_in_child=self._reset)

    def _reset(self) -> None:
        """Start empty, also after a fork.

        The parent's thread is not in the child, and the parent sends its own messages.
        """
        # Not queue.Queue: gevent replaces it by one that a thread cannot wait for.
        self._queue: deque[_Item] = deque()
        self._changed = threading.Condition()
        # Queued, or taken and not sent yet.
        self._unfinished = 0
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def put(self, item: _Item) -> None:
        """Queue an end message, or a hint about this transaction; returns at once."""
        with self._changed:
            if fits := len(self._queue) < MAX_QUEUED:
                self._queue.append(item)
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
                # The interpreter is shutting down: the messages are lost, and check-back settles their transactions.
                logger.info(
                    "the flusher thread cannot be started any more, check-back will settle the queued transactions"
                )
                return
            self._thread = thread

    def flush(self, *, within_seconds: float) -> bool:
        """See Flusher.flush."""
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
            items = self._take()
            try:
                self._send(items)
            except BrokerError as error:
                logger.warning("%d end messages were not sent, check-back will settle them: %s", len(items), error)
            except Exception:
                logger.exception("the flusher failed; check-back will settle %d end messages", len(items))
            with self._changed:
                self._unfinished -= len(items)
                self._changed.notify_all()

    def _take(self) -> list[_Item]:
        """Wait for a message, then take all queued ones up to the batch limit."""
        with self._changed:
            while not self._queue:
                self._changed.wait()
            return [self._queue.popleft() for _ in range(min(len(self._queue), MAX_BATCH))]

    def _send(self, items: list[_Item]) -> None:
        broker = self._receiver()
        if ends := [item for item in items if isinstance(item, EndTransaction)]:
            point("producer.before_end")
            broker.end(ends)
            point("producer.after_end")
        if hints := [item for item in items if isinstance(item, UUID)]:
            broker.hint_checks(hints)
