"""The port of consuming: a bounded pass, a run until it is stopped, and positions that belong to the group."""

from __future__ import annotations

import threading

from outbox.message import Delivery, Message
from outbox.ports import ConsumeCounts
from outbox.retry import RetryPolicy
from outbox.subscription import Subscription
from tests.contract.benches import Bench
from tests.contract.test_consumption import messages, numbers
from tests.support import eventually

LATER = RetryPolicy(delays_seconds=[600], max_attempts=3)


def test_a_bounded_pass_handles_what_is_there_and_counts_it(any_path: Bench) -> None:
    received: list[Delivery] = []

    def handle(delivery: Delivery) -> None:
        if delivery.body["n"] == 1:
            raise ValueError("not this one")
        received.append(delivery)

    wanted = Subscription(group="points", topic="orders", filter="paid", retry=LATER)
    any_path.publish([*messages(4, tag="paid"), *messages(2, tag="lost")], commit=True)
    any_path.visible("orders")
    consumers = any_path.consumers((wanted, handle))
    assert consumers.run_once() == ConsumeCounts(handled=3, filtered=2, failed=1)
    assert consumers.run_once() == ConsumeCounts()
    assert numbers(received) == [0, 2, 3]


def test_a_pass_goes_on_where_the_group_is(any_path: Bench) -> None:
    received: list[list[Delivery]] = [[], []]
    wanted = Subscription(group="points", topic="orders")
    for seen in received:
        any_path.publish(messages(3), commit=True)
        any_path.visible("orders")
        assert any_path.consumers((wanted, seen.append)).run_once() == ConsumeCounts(handled=3)
    assert [numbers(seen) for seen in received] == [[0, 1, 2], [0, 1, 2]]


def test_consumers_handle_their_own_subscriptions_only(any_path: Bench) -> None:
    seen: dict[str, list[Delivery]] = {"logistics": [], "points": []}
    any_path.publish(messages(3), commit=True)
    any_path.visible("orders")
    both = [any_path.consumers((Subscription(group=name, topic="orders"), seen[name].append)) for name in seen]
    both[0].run_once()
    assert (numbers(seen["logistics"]), numbers(seen["points"])) == ([0, 1, 2], [])
    both[1].run_once()
    assert numbers(seen["points"]) == [0, 1, 2]


def test_a_run_consumes_until_it_is_stopped(any_path: Bench) -> None:
    received: list[Delivery] = []
    sent = Message(topic="orders", body=b'{"n":7}')
    stop = threading.Event()
    consumers = any_path.consumers((Subscription(group="points", topic="orders"), received.append))
    running = threading.Thread(target=consumers.run, args=[stop])
    running.start()
    try:
        any_path.publish([sent], commit=True)
        any_path.visible("orders")
        eventually(lambda: received, what="the message is handled")
    finally:
        stop.set()
        running.join(60)
    assert not running.is_alive()
    assert [delivery.message_id for delivery in received] == [sent.message_id]
