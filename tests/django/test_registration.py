"""The subscriptions that `@subscriber` registers, and the arguments that it refuses."""

from __future__ import annotations

import importlib
from functools import partial
from pathlib import Path
from typing import Any

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


def send(kind: str, given: Delivery) -> None: ...


class Sends:
    def __init__(self, kind: str) -> None:
        self.kind = kind

    def __call__(self, given: Delivery) -> None: ...

    def send(self, given: Delivery) -> None: ...


def undecorated(function: Any) -> Any:
    def call(given: Delivery) -> None:
        function(given)

    return call


def paid(given: Delivery) -> None: ...


def refunded(given: Delivery) -> None: ...


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (partial(send, "paid"), partial(send, "refunded")),
        (Sends("paid"), Sends("refunded")),
        (Sends("paid").send, Sends("refunded").send),
        (undecorated(paid), undecorated(refunded)),
    ],
)
def test_two_functions_of_one_name_do_not_replace_each_other(first: Any, second: Any) -> None:
    subscriber("orders", group="g")(first)
    with pytest.raises(InvalidSubscription, match="another"):
        subscriber("orders", group="g")(second)


def test_a_second_filter_does_not_replace_the_first() -> None:
    subscriber("orders", group="g", tag="paid")(paid)
    with pytest.raises(InvalidSubscription, match=r"tag=\['paid', 'refunded'\]"):
        subscriber("orders", group="g", tag="refunded")(paid)


def test_a_module_that_is_reloaded_registers_its_functions_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "registered_again.py"
    path.write_text(
        "from functools import partial\n"
        "from outbox.contrib.django import subscriber\n"
        "def send(kind, given): ...\n"
        "def log(function): return lambda given: function(given)\n"
        "subscriber('orders', group='a')(partial(send, 'paid'))\n"
        "subscriber('orders', group='b')(log(send))\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    importlib.reload(importlib.import_module("registered_again"))
    assert len(registry.subscribers()) == 2


def test_an_unknown_group_is_named() -> None:
    register()
    with pytest.raises(ConfigurationError, match=r"nobody.*effects"):
        registry.subscriptions(groups=["nobody"])
