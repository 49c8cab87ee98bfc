"""An option of a part decides which message is next. The core knows only the hook and the base of such lanes."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from outbox import hooks
from outbox.broker.consumer import runtime
from outbox.broker.consumer.fetch import LARGEST_BUFFERED_BODY
from outbox.broker.consumer.lanes import FetchedEntry, NamedQueue, RoundRobinLane
from outbox.errors import InvalidSubscription
from outbox.message import Delivery, Message
from outbox.subscription import Mode, Subscription, SubscriptionOption
from tests.broker.bench import FIFO, ConsumptionBench, Seen, encode
from tests.support import eventually


class ByTag(SubscriptionOption):
    """The tags take turns."""

    @property
    def has_lane(self) -> bool:
        return True


class TagLane(RoundRobinLane[NamedQueue]):
    """The lane of `ByTag`. It also sees the tags of messages with large bodies."""

    def __init__(self, option: ByTag) -> None:
        super().__init__(NamedQueue)

    def offer(self, items: Sequence[FetchedEntry]) -> None:
        for item in items:
            assert item.row is not None
            item.key = item.row[9]
        super().offer(items)


@pytest.fixture(autouse=True)
def part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(hooks.lanes, ByTag, f"{__name__}.TagLane")


def test_the_lane_of_a_part_chooses_the_next_message(bench: ConsumptionBench) -> None:
    bench.declare("orders", queues=1, types=FIFO)
    filler = "x" * LARGEST_BUFFERED_BODY
    tags = ["a"] * 40 + ["b"] * 3 + ["c"]
    bench.publish(
        [
            Message(topic="orders", tag=tag, key="k", body=encode({"filler": filler if n % 2 else ""}))
            for n, tag in enumerate(tags)
        ]
    )
    for mode, expected in ((Mode.CONCURRENT, [*"abcabab", *["a"] * 37]), (Mode.ORDERLY, tags)):
        handled: list[str] = []

        def handle(delivery: Delivery, handled: list[str] = handled) -> None:
            handled.append(delivery.tag)

        bench.run_until_idle(
            Subscription(group=f"g-{mode}", topic="orders", mode=mode, threads=1, options=[ByTag()]), handle
        )
        assert handled == expected
        bench.assert_conserved(f"g-{mode}")


def test_two_lanes_are_refused() -> None:
    with pytest.raises(InvalidSubscription, match="only one option may decide which message is next"):
        Subscription(group="g", topic="orders", options=[ByTag(), ByTag()])


def test_messages_behind_many_others_are_fetched_without_a_wait(
    bench: ConsumptionBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No fetched message fills the buffer, and no handler is called whose end would wake the process."""
    monkeypatch.setattr(runtime, "_LISTENING_POLL_SECONDS", 3600.0)
    bench.declare("orders", queues=1)
    bench.publish([Message(topic="orders", tag="other", body=encode({})) for _ in range(1_000)])
    bench.publish([Message(topic="orders", tag="wanted", body=encode({"n": 0}))])
    seen = Seen()
    with bench.running((Subscription(group="g", topic="orders", filter="wanted"), seen)):
        eventually(lambda: seen.ns == [0])
