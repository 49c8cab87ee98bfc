"""For tests of applications: an in-memory broker that respects rollbacks, and `drain` that runs the subscribers.

    class PayTests(OutboxTestMixin, TestCase):
        def test_pay(self):
            pay(order)
            self.assertEqual([m.key for m in self.outbox.messages("order-paid")], [str(order.pk)])
            self.outbox.drain()

With pytest, make a fixture of `in_memory_outbox`. Nothing is sent anywhere. A TestCase never commits; here a
transaction counts as committed when its own atomic blocks are left, so `captureOnCommitCallbacks` is not needed
(and does no harm).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any

from django.conf import settings as django_settings
from django.test.utils import override_settings

from outbox.contrib.django.broker import get_broker, get_codecs, reset_broker
from outbox.contrib.django.in_memory import settle
from outbox.contrib.django.registry import autodiscover, subscriptions
from outbox.memory import InMemoryBroker
from outbox.message import Message
from outbox.ports import AnyHandler


class InMemoryOutbox:
    """What a test sees of the broker."""

    def __init__(self, broker: InMemoryBroker) -> None:
        self.broker = broker
        self._errors: list[Exception] = []

    def subscribe_all(self, groups: Sequence[str] = ()) -> None:
        """Let `drain` run the project's subscribers (of some groups only, if named)."""
        autodiscover()
        for subscription, handler in subscriptions(groups=groups):
            self.broker.subscribe(subscription, self._recording(handler))

    def _recording(self, handler: AnyHandler) -> AnyHandler:
        @wraps(handler)
        def recorded(deliveries: Any) -> Any:
            try:
                return handler(deliveries)
            except Exception as error:
                self._errors.append(error)
                raise

        return recorded

    def messages(self, topic: str) -> list[Message]:
        """What subscribers of the topic can see: messages of committed transactions, queue by queue."""
        self.settle()
        return self.broker.visible(topic)

    def bodies(self, topic: str) -> list[Any]:
        """The decoded bodies of `messages`."""
        return [get_codecs().decode(item.content_type, item.body) for item in self.messages(topic)]

    def drain(self, *, raise_errors: bool = True) -> int:
        """Run subscribers until nothing is deliverable, also what they publish; returns the number of deliveries.

        Raises the first error of a handler unless `raise_errors` is off; then failed messages wait for their
        retry (`broker.advance` moves the time on).
        """
        total = 0
        self._errors.clear()
        while True:
            self.settle()
            count = self.broker.drain()
            if self._errors and raise_errors:
                raise self._errors[0]
            if not count:
                return total
            total += count

    def settle(self) -> None:
        """Decide every half message whose transaction is over, as check-back would: by its ledger row."""
        settle(self.broker)


@contextmanager
def in_memory_outbox(*, groups: Sequence[str] = (), **settings: Any) -> Iterator[InMemoryOutbox]:
    """A fresh in-memory broker for the block, with the project's subscribers; `settings` are further keys of OUTBOX."""
    configured = getattr(django_settings, "OUTBOX", {})
    changed = {"PRODUCER_GROUP": "tests", **configured, **settings, "IN_MEMORY": True, "LEDGER": True}
    with ExitStack() as stack:
        stack.enter_context(override_settings(OUTBOX=changed))
        reset_broker()
        stack.callback(reset_broker)
        broker = get_broker()
        assert isinstance(broker, InMemoryBroker)
        outbox = InMemoryOutbox(broker)
        outbox.subscribe_all(groups)
        yield outbox


class OutboxTestMixin:
    """Gives every test of a TestCase a fresh `self.outbox`."""

    outbox: InMemoryOutbox

    def setUp(self) -> None:
        super().setUp()  # type: ignore[misc]
        self.outbox = self.enterContext(in_memory_outbox())  # type: ignore[attr-defined]
