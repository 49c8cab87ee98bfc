"""An operator skips the message that blocks a queue: the next ones are handled, and every entry is accounted for."""

from __future__ import annotations

from uuid import UUID, uuid4

import pytest

from outbox.broker.operations.audit import count_messages
from outbox.broker.operations.changes import skip
from outbox.broker.operations.progress import QueueProgress, list_queues
from outbox.errors import UnknownGroup, UnknownTopic, UsageError
from outbox.message import Delivery
from outbox.retry import RetryPolicy
from outbox.subscription import Mode, OnError, Subscription
from tests.broker.bench import ConsumptionBench
from tests.broker.operations.support import publish
from tests.support import eventually

# After its first attempt a message waits for so long that no test sees the second one.
LATER = RetryPolicy(delays_seconds=[600], max_attempts=16)


@pytest.fixture
def orders(bench: ConsumptionBench) -> ConsumptionBench:
    bench.declare("orders", queues=1)
    return bench


def subscription(mode: Mode = Mode.ORDERLY, *, stops: bool = False) -> Subscription:
    policy: dict[type[BaseException], OnError] = {ValueError: OnError.STOP} if stops else {}
    return Subscription(group="g", topic="orders", mode=mode, retry=LATER, suspend_seconds=600, on_error=policy)


class Handler:
    """Fails at each message whose key begins with "bad"."""

    def __init__(self) -> None:
        self.handled: list[str] = []

    def __call__(self, delivery: Delivery) -> None:
        if delivery.key.startswith("bad"):
            raise ValueError("this order cannot be booked")
        self.handled.append(delivery.key)


def blocked(bench: ConsumptionBench) -> list[QueueProgress]:
    return [queue for queue in list_queues(bench.run, "g", "orders") if queue.blocked_by is not None]


def offset(bench: ConsumptionBench) -> int:
    [queue] = [queue for queue in list_queues(bench.run, "g", "orders") if not queue.is_retry]
    return queue.next_offset


@pytest.mark.parametrize("stops", [False, True], ids=["fails in place", "stopped"])
def test_the_next_messages_are_handled_by_the_running_consumer(orders: ConsumptionBench, stops: bool) -> None:
    _, bad, *_ = publish(orders, "a", "bad", "b", "c")
    handler = Handler()
    with orders.running((subscription(stops=stops), handler)):
        [queue] = eventually(
            lambda: [one for one in blocked(orders) if one.next_offset == 1 and (one.stopped is not None) is stops]
        )
        assert queue.blocked_by == bad.message_id
        assert handler.handled == ["a"]
        planned = skip(orders.run, "g", "orders", bad.message_id, dry_run=True)
        assert (planned.from_offset, planned.to_offset, blocked(orders)) == (1, 2, [queue])
        assert skip(orders.run, "g", "orders", bad.message_id) == planned
        eventually(lambda: handler.handled == ["a", "b", "c"])
    assert not blocked(orders)
    assert count_messages(orders.run).differences() == []


def test_messages_of_other_keys_that_are_finished_are_not_handled_again(orders: ConsumptionBench) -> None:
    """In key order, the messages behind a blocked key are finished ahead of the stored position."""
    bad, *_ = publish(orders, "bad", "a", "b", "c")
    handler = Handler()
    with orders.running((subscription(Mode.KEY_ORDERED), handler)):
        eventually(lambda: blocked(orders) and sorted(handler.handled) == ["a", "b", "c"])
        skip(orders.run, "g", "orders", bad.message_id)
        eventually(lambda: offset(orders) == 4)
    assert count_messages(orders.run).differences() == []


def test_a_message_that_blocks_nothing_is_not_skipped(orders: ConsumptionBench) -> None:
    bad, after, *_ = publish(orders, "bad", "after")
    orders.runtime((subscription(), Handler())).run_once()
    for other in (after.message_id, uuid4()):
        with pytest.raises(UsageError, match=r"does not block a queue of group 'g' .* nothing was skipped"):
            skip(orders.run, "g", "orders", other)
    _refuses_unknown_names(orders, bad.message_id)
    assert offset(orders) == 0
    skip(orders.run, "g", "orders", bad.message_id)
    assert offset(orders) == 1
    with pytest.raises(UsageError, match="the group has finished the message"):
        skip(orders.run, "g", "orders", bad.message_id)
    assert offset(orders) == 1, "once"


def _refuses_unknown_names(bench: ConsumptionBench, message_id: UUID) -> None:
    with pytest.raises(UnknownGroup):
        skip(bench.run, "nobody", "orders", message_id)
    with pytest.raises(UnknownTopic):
        skip(bench.run, "g", "nothing", message_id)
