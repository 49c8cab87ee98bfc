"""Sends end messages and hints so that no request waits for them. Losing them is harmless: check-back finds out.

The bundled broker takes them one way, from the thread that has them. An engine whose client only knows calls that wait
gets them from a daemon thread, one per process, started by the first of them after start or fork: in batches, from a
bounded queue that drops what does not fit.
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
from outbox.faults import point
from outbox.ports import Broker
from outbox.transaction import EndTransaction

logger = logging.getLogger(__name__)

MAX_QUEUED: Final = 10_000
MAX_BATCH: Final = 500
_EXIT_SECONDS: Final = 2.0

# A decision, or the id of a transaction to check soon.
_Item = EndTransaction | UUID


class Flusher:
    """The ends of one process, on the way that its broker takes them. All methods may be called from any thread.

    `receiver` gives the broker, `one_way` the same if it takes ends one way.
    """

    def __init__(self, receiver: Callable[[], Broker], one_way: Callable[[], PostgresBroker | None]) -> None:
        self._one_way = one_way
        self._thread = FlushingThread(receiver)
        atexit.register(self.flush, within_seconds=_EXIT_SECONDS)

    def end(self, end: EndTransaction) -> None:
        """Send an end message soon; returns at once. Dropped when too much is on its way."""
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
        """Wait until everything so far was sent (or given up); False when time ran out first."""
        deadline = time.monotonic() + within_seconds
        broker = self._one_way()
        if broker is not None and not broker.flush(within_seconds=within_seconds):
            return False
        # What an engine of before was left with, too.
        return self._thread.flush(within_seconds=max(0.0, deadline - time.monotonic()))


class FlushingThread:
    """Ends and hints for a broker that is waited for, by a daemon thread. All methods may be called from any thread."""

    def __init__(self, receiver: Callable[[], Broker]) -> None:
        self._receiver = receiver
        self.dropped = 0
        self._reset()
        os.register_at_fork(after_in_child=self._reset)

    def _reset(self) -> None:
        """Also after a fork: the parent's thread is not in the child, and its ends are the parent's to send."""
        # Not queue.Queue: gevent replaces it by one that nobody can wait for.
        self._queue: deque[_Item] = deque()
        self._changed = threading.Condition()
        # Queued, or taken and not yet sent.
        self._unfinished = 0
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def put(self, item: _Item) -> None:
        """Have an end, or a hint about this transaction, sent soon; returns at once."""
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
                # The interpreter is shutting down: the ends are lost, which check-back makes good.
                logger.info("no flusher thread can be started any more, check-back will settle what is queued")
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
        """Wait for something to do, then take all of it up to the batch limit."""
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
