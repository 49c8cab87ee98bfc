"""Messages of tenants, and a handler that records their order."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from outbox.contrib.fair_share import FairShare
from outbox.message import Delivery, Message
from outbox.subscription import Subscription
from tests.broker.bench import AT_ONCE, ConsumptionBench, encode
from tests.support import eventually

HEADER = FairShare(header="tenant")
PREFIX = FairShare(key_prefix=":")


def of(tenant: str, count: int, *, size: int = 0, option: FairShare = HEADER) -> list[Message]:
    """Messages of a tenant, with a body of `size` bytes at least."""
    body = {"tenant": tenant, "filler": "x" * size}
    named = {"headers": {"tenant": tenant}} if option is HEADER else {"key": f"{tenant}:{tenant}"}
    return [Message(topic="orders", body=encode({**body, "n": n}), **named) for n in range(count)]


def fair(option: FairShare | None = HEADER, **fields: Any) -> Subscription:
    """A subscription with one thread, which handles one message after the other."""
    values = {"group": "g", "topic": "orders", "threads": 1, "retry": AT_ONCE, **fields}
    return Subscription(options=[] if option is None else [option], **values)


class Handled:
    """Records the messages in the order of their calls. The first call waits until `ready` holds."""

    def __init__(
        self, ready: Callable[[], object] = lambda: None, fails: Callable[[Delivery], bool] = lambda delivery: False
    ) -> None:
        self._ready, self._fails, self._lock = ready, fails, threading.Lock()
        self.has_started = threading.Event()
        self.calls: list[tuple[str, int]] = []

    def __call__(self, delivery: Delivery) -> None:
        if not self.has_started.is_set():
            self.has_started.set()
            self._ready()
        if self._fails(delivery):
            raise ValueError(f"attempt {delivery.attempt} of {delivery.message_id}")
        with self._lock:
            self.calls.append((delivery.body["tenant"], delivery.body["n"]))

    def all_of(self, orders: ConsumptionBench, count: int) -> None:
        """Wait until this number of messages is handled, each once, and nothing else is left."""
        eventually(lambda: len(self.calls) == count, within_seconds=90, what=lambda: f"{len(self.calls)} are handled")
        eventually(lambda: orders.lag("g") == 0)
        assert len(set(self.calls)) == count

    def places(self, tenant: str) -> list[int]:
        """How many messages were handled before each message of a tenant."""
        with self._lock:
            return [place for place, (name, _) in enumerate(self.calls) if name == tenant]


class Gate:
    """A handler that lets the calls of tenant `a` begin one by one, while the test waits for something."""

    def __init__(self, handle: Handled) -> None:
        self._handle, self._permits = handle, threading.Semaphore(0)

    def __call__(self, delivery: Delivery) -> None:
        assert delivery.body["tenant"] != "a" or self._permits.acquire(timeout=60)
        self._handle(delivery)

    def until(self, condition: Callable[[], bool]) -> None:
        """Wait for the condition, then let all calls begin."""

        def one_more() -> bool:
            self._permits.release()
            return condition()

        try:
            eventually(one_more, within_seconds=30)
        finally:
            self._permits.release(100_000)
