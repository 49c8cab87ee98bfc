"""Sends end messages and hints in the background, so that no request waits for them. Losing them is harmless.

One daemon thread per process, started by the first of them after start or fork. They are batched; the queue is
bounded and drops what does not fit, because check-back finds out anyway.
"""

from __future__ import annotations

import atexit
import logging
import os
import queue
import threading
import time
from collections.abc import Callable
from typing import Final
from uuid import UUID

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
    """The queue of one process. All methods may be called from any thread."""

    def __init__(self, receiver: Callable[[], Broker]) -> None:
        self._receiver = receiver
        self.dropped = 0
        self._reset()
        os.register_at_fork(after_in_child=self._reset)
        atexit.register(self.flush, within_seconds=_EXIT_SECONDS)

    def _reset(self) -> None:
        """Also after a fork: the parent's thread is not in the child, and its ends are the parent's to send."""
        self._queue: queue.Queue[_Item] = queue.Queue(MAX_QUEUED)
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def end(self, end: EndTransaction) -> None:
        """Queue an end message; returns at once. Dropped when the queue is full."""
        self._put(end)

    def hint(self, transaction_id: UUID) -> None:
        """Queue a hint to check soon; otherwise like `end`."""
        self._put(transaction_id)

    def _put(self, item: _Item) -> None:
        try:
            self._queue.put_nowait(item)
        except queue.Full:
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

    def flush(self, *, within_seconds: float = _EXIT_SECONDS) -> bool:
        """Wait until everything queued so far was sent (or given up); False when time ran out first."""
        deadline = time.monotonic() + within_seconds
        with self._queue.all_tasks_done:
            while self._queue.unfinished_tasks:
                left = deadline - time.monotonic()
                if left <= 0 or self._thread is None or not self._thread.is_alive():
                    return False
                self._queue.all_tasks_done.wait(left)
        return True

    def _run(self) -> None:
        work = self._queue
        while True:
            items = _take(work)
            try:
                self._send(items)
            except BrokerError as error:
                logger.warning("%d end messages were not sent, check-back will settle them: %s", len(items), error)
            except Exception:
                logger.exception("the flusher failed; check-back will settle %d end messages", len(items))
            for _ in items:
                work.task_done()

    def _send(self, items: list[_Item]) -> None:
        broker = self._receiver()
        if ends := [item for item in items if isinstance(item, EndTransaction)]:
            point("producer.before_end")
            broker.end(ends)
            point("producer.after_end")
        if hints := [item for item in items if isinstance(item, UUID)]:
            broker.hint_checks(hints)


def _take(work: queue.Queue[_Item]) -> list[_Item]:
    """Wait for something to do, then take all of it up to the batch limit."""
    items = [work.get()]
    while len(items) < MAX_BATCH:
        try:
            items.append(work.get_nowait())
        except queue.Empty:
            break
    return items
