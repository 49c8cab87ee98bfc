"""The same with pytest-django and the fixtures of the plugin; run by test_application_tests.py."""

from __future__ import annotations

import pytest

from outbox.contrib.django import publish
from outbox.contrib.django.testing import BrokerOutbox, InMemoryOutbox
from outbox.errors import ConfigurationError
from tests.django.outbox_cases import effects, place
from tests.django.state import rolled_back


def test_no_broker_without_the_mark() -> None:
    with pytest.raises(ConfigurationError, match="IN_MEMORY"):
        publish("orders", {}, key="leak", at_once=True)


@pytest.mark.django_db(transaction=True)
def test_no_broker_with_other_databases_only() -> None:
    for work in (lambda: place("leak"), lambda: publish("orders", {}, key="leak", at_once=True)):
        with pytest.raises(ConfigurationError, match="IN_MEMORY"):
            work()


@pytest.mark.parametrize("number", ["1", "2"])
def test_in_memory(outbox: InMemoryOutbox, number: str) -> None:
    place(number)
    with rolled_back():
        publish("orders", {}, key="undone")
    assert [item.key for item in outbox.messages("orders")] == [number]
    assert outbox.drain() == 2
    assert effects() == [number, f"step-{number}"]


@pytest.mark.parametrize("number", ["1", "2", "3"])
def test_on_the_broker(outbox_broker: BrokerOutbox, number: str) -> None:
    place(number)
    with rolled_back():
        publish("orders", {}, key="undone")
    assert [item.key for item in outbox_broker.messages("orders")] == [number]
    if number != "1":
        # Rows of the first test are not there for the others.
        assert outbox_broker.drain() == 2
        assert effects() == [number, f"step-{number}"]


def test_redelivery_on_the_broker(outbox_broker: BrokerOutbox) -> None:
    place("again")
    assert outbox_broker.drain() == 2
    assert outbox_broker.redeliver() == 0
    assert effects() == ["again", "step-again"]
    assert outbox_broker.redeliver(bypass_inbox=True) == 2
    assert effects() == ["again", "again", "step-again", "step-again"]


@pytest.mark.django_db(transaction=True, databases=["default", "broker"])
def test_on_the_broker_with_a_mark(outbox_broker: BrokerOutbox) -> None:
    publish("payments", {}, key="marked", at_once=True)
    with pytest.raises(RuntimeError, match="first attempt"):
        outbox_broker.drain()


@pytest.mark.django_db(transaction=True)
def test_a_mark_without_the_broker_is_an_error(request: pytest.FixtureRequest) -> None:
    with pytest.raises(ConfigurationError, match=r"'broker'.*databases"):
        request.getfixturevalue("outbox_broker")
