"""The thread that sends ends for an engine whose client only has blocking calls."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from outbox.rocketmq.flushing import MAX_QUEUED, FlushingThread
from outbox.transaction import Decision, EndTransaction
from outbox.utils.ids import uuid7


class Recorder:
    """Takes ends when it is let to."""

    def __init__(self) -> None:
        self.taken: list[EndTransaction] = []
        self.open = threading.Event()

    def __call__(self, ends: Sequence[EndTransaction]) -> None:
        self.open.wait(10)
        self.taken.extend(ends)


def end() -> EndTransaction:
    return EndTransaction(transaction_id=uuid7(), decision=Decision.COMMIT, producer_group="g")


def test_a_full_queue_drops_and_no_caller_waits() -> None:
    recorder = Recorder()
    flushing = FlushingThread(recorder)
    for _ in range(MAX_QUEUED + 1000):
        flushing.put(end())
    assert 1000 - 500 <= flushing.dropped <= 1000
    assert not flushing.flush(within_seconds=0.1)
    recorder.open.set()
    assert flushing.flush(within_seconds=10)
    assert len(recorder.taken) == MAX_QUEUED + 1000 - flushing.dropped
