"""A flood of one topic does not take the turn of another subscription of the process."""

from __future__ import annotations

import threading
from functools import partial
from typing import Any

import pytest

from outbox.message import Message
from outbox.subscription import Mode, Subscription
from tests.broker.bench import ConsumptionBench, Seen, encode
from tests.support import eventually


def has_come(seen: Seen, n: int) -> bool:
    return seen.ns[-1:] == [n]


@pytest.mark.parametrize("mode", [Mode.CONCURRENT, Mode.KEY_ORDERED])
def test_a_subscription_is_served_while_another_one_has_a_backlog(bench: ConsumptionBench, mode: Mode) -> None:
    """All handlers of the flood wait, its lanes are full, and thousands of its messages are not fetched yet."""
    go_on = threading.Event()
    started: list[None] = []

    def wait(_: Any) -> None:
        started.append(None)
        assert go_on.wait(60)

    bench.declare("flood")
    bench.declare("calm")
    bench.publish([Message(topic="flood", key=str(n % 100), body=encode({"n": n})) for n in range(5_000)])
    seen = Seen()
    flood = Subscription(topic="flood", group="flood", threads=2, mode=mode)
    with bench.running((flood, wait), (Subscription(topic="calm", group="calm"), seen)):
        try:
            eventually(lambda: len(started) == 2)
            for n in range(3):
                bench.publish([Message(topic="calm", body=encode({"n": n}))])
                eventually(partial(has_come, seen, n), what="the message of the other subscription")
            assert len(started) == 2
        finally:
            go_on.set()
        eventually(lambda: bench.lag("calm") == 0)
