"""A process that got no CPU time for a while is given its own message again while its handler still runs."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import pytest

from outbox.contrib.django import ClaimedDelivery, subscriber
from outbox.contrib.django.models import ClaimEntry, StepEntry
from outbox.contrib.django.subscribers import registry
from outbox.contrib.django.subscribers.outside import HandlerInvoker
from outbox.ports import ClaimedElsewhere, Disposition
from tests.django.shop.models import Effect
from tests.django.test_inbox import delivery

pytestmark = pytest.mark.usefixtures("application", "no_subscribers", "no_rows")


@pytest.fixture
def no_rows() -> Iterator[None]:
    """Claims and steps are removed after the test."""
    yield
    ClaimEntry.objects.all().delete()
    StepEntry.objects.all().delete()


def claim(given: Any) -> Any:
    [registered] = registry.subscribers()
    subscription, handler = registered.subscription, registered.handler
    return HandlerInvoker().claim(subscription, handler, given, lambda _: None, generation=1)


def test_a_claim_whose_term_is_over_is_not_taken_from_a_handler_of_this_process() -> None:
    began, may_end = threading.Event(), threading.Event()
    calls: list[int] = []

    @subscriber("orders", group="effects", effects="outside")
    def slow(given: ClaimedDelivery) -> None:
        calls.append(given.attempt)
        began.set()
        assert may_end.wait(60)
        with given.finish():
            Effect.objects.create(number=given.key)

    once = delivery("one")
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(claim(once)))
    thread.start()
    try:
        assert began.wait(60)
        # As after a time in which the thread that renews claims did not run.
        ClaimEntry.objects.update(expires_at=datetime(2020, 1, 1, tzinfo=UTC))
        assert isinstance(claim(once), ClaimedElsewhere)
    finally:
        may_end.set()
        thread.join(60)
    assert results == [Disposition.HANDLED]
    assert claim(once) is Disposition.SKIPPED
    assert calls == [1]
    assert list(Effect.objects.values_list("number", flat=True)) == ["one"]
