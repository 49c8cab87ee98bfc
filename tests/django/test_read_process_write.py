"""Read, process, write: outputs, effects, and the note that a handler ran commit together or not at all."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

import pytest
from django.db import transaction

from outbox import Delivery
from outbox.contrib.django import message, publish_many, publish_messages, subscriber
from outbox.contrib.django.engine.broker import flush, reset_broker
from outbox.contrib.django.models import InboxEntry
from outbox.contrib.django.operations.installation import install_broker
from outbox.contrib.django.settings.conf import get_settings
from outbox.contrib.django.worker.drain import drain
from outbox.retry import RetryPolicy
from tests.django.shop.models import Effect
from tests.django.state import execute

COUNT = 200
AT_ONCE = RetryPolicy(delays_seconds=[0.0], max_attempts=30)


@pytest.fixture(params=["two_phase", pytest.param("atomic", marks=pytest.mark.slow)])
def _fresh_broker(
    request: pytest.FixtureRequest, databases: None, no_subscribers: None, outbox_settings: Callable[..., None]
) -> Iterator[None]:
    """A broker that never had a consumer, in a database of its own or in the application's."""
    if request.param == "two_phase":
        yield
        return
    outbox_settings(BROKER="default", SCHEMA="fresh")
    install_broker(get_settings())
    yield
    flush(within_seconds=10)
    reset_broker()
    execute("DROP SCHEMA fresh CASCADE")


pytestmark = pytest.mark.usefixtures("_fresh_broker")


class Aborted(Exception):
    """Raised by a handler on purpose, after it has written and published."""


def write(deliveries: Sequence[Delivery]) -> None:
    """The process and write of the chain: an effect and two messages for each that was read."""
    Effect.objects.bulk_create([Effect(number=delivery.key) for delivery in deliveries])
    publish_messages([message(topic, one.body, key=one.key) for one in deliveries for topic in ("payments", "steps")])


def read_all() -> dict[str, Counter[str]]:
    """Run until nothing is left; topic -> how often its consumers saw each key."""
    seen = {"payments": Counter[str](), "steps": Counter[str]()}
    for topic, counter in seen.items():
        # Without an inbox: a message that was published twice is counted twice.
        subscriber(topic, group="reader", batch=100, idempotent=False)(
            lambda deliveries, counter=counter: counter.update(item.key for item in deliveries)
        )
    while drain().handled:
        flush(within_seconds=10)
    return seen


def assert_exactly_once(seen: dict[str, Counter[str]]) -> None:
    once = Counter(str(number) for number in range(COUNT))
    assert seen == {"payments": once, "steps": once}
    assert Counter(Effect.objects.values_list("number", flat=True)) == once
    assert InboxEntry.objects.filter(group="chain").count() == COUNT


def publish_inputs() -> None:
    with transaction.atomic():
        publish_many("orders", range(COUNT), key=str)


def test_read_process_write_with_alternating_aborts_gives_the_exact_set() -> None:
    aborts: list[int] = []

    @subscriber("orders", group="chain", retry=AT_ONCE)
    def chain(delivery: Delivery) -> None:
        write([delivery])
        if delivery.attempt == 1 and delivery.body % 2:
            aborts.append(1)
            raise Aborted

    publish_inputs()
    assert_exactly_once(read_all())
    assert len(aborts) == COUNT // 2


def test_read_process_write_in_batches_with_alternating_aborts_gives_the_exact_set() -> None:
    aborts: list[int] = []
    turns = itertools.count()

    @subscriber("orders", group="chain", batch=20, retry=AT_ONCE)
    def chain(deliveries: Sequence[Delivery]) -> None:
        write(deliveries)
        if next(turns) % 2:
            aborts.append(1)
            raise Aborted

    publish_inputs()
    assert_exactly_once(read_all())
    assert len(aborts) >= COUNT // 20 // 2
