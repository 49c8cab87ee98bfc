"""The subscriptions that `@subscriber` registers, and the arguments that it refuses."""

from __future__ import annotations

import pytest

from outbox import Delivery, OnError, Start
from outbox.contrib.django import subscriber
from outbox.contrib.django.subscribers import registry
from outbox.errors import ConfigurationError, InvalidFilter, InvalidSubscription
from tests.django.test_inbox import register
from tests.django.urls import Refused

pytestmark = pytest.mark.usefixtures("application", "no_subscribers")


def test_the_arguments_of_subscriber_become_its_subscription() -> None:
    @subscriber(
        "orders", group="g", tag=["paid", "refunded"], mode="orderly", on_error={Refused: "retry_later"}, start="latest"
    )
    def handler(given: Delivery) -> None: ...

    subscription = registry.subscribers()[-1].subscription
    assert subscription.filter == "paid || refunded"
    assert subscription.reaction(Refused()) is OnError.RETRY_LATER
    assert subscription.start is Start.LATEST

    @subscriber("orders", group="h", filter="amount > 10")
    def other(given: Delivery) -> None: ...

    assert registry.subscribers()[-1].subscription.filter == "sql:amount > 10"


def test_bad_filters_are_refused() -> None:
    with pytest.raises(InvalidSubscription, match="not both"):
        subscriber("orders", group="g", tag="a", filter="b = 1")
    with pytest.raises(InvalidFilter, match="column"):
        subscriber("orders", group="g", filter="amount >")


def test_one_group_handles_a_topic_in_one_place() -> None:
    def first(given: Delivery) -> None: ...
    def second(given: Delivery) -> None: ...

    subscriber("orders", group="g")(first)
    with pytest.raises(InvalidSubscription, match=r"first.*second"):
        subscriber("orders", group="g")(second)


def test_an_unknown_group_is_named() -> None:
    register()
    with pytest.raises(ConfigurationError, match=r"nobody.*effects"):
        registry.subscriptions(groups=["nobody"])
