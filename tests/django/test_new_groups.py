"""A group that is new to a topic with handled messages declares its start, or `check` warns about it."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from django.core.checks import CheckMessage

from outbox import Delivery
from outbox.contrib.django import publish, subscriber
from outbox.contrib.django.operations.checks import check_databases
from outbox.contrib.django.subscribers import registry
from outbox.contrib.django.worker.workers import consumer_runtime
from tests.django.support import sequence

pytestmark = pytest.mark.usefixtures("databases", "no_subscribers")


def subscribe(group: str, **options: Any) -> None:
    @subscriber("orders", group=group, **options)
    def ship(delivery: Delivery) -> None: ...


def warned() -> list[CheckMessage]:
    return [one for one in check_databases(databases=["broker"]) if one.id == "outbox.W032"]


@pytest.fixture
def _history(databases: None, no_subscribers: None) -> None:
    """Three messages that the group shipping has handled."""
    subscribe("shipping")
    for number in range(3):
        publish("orders", {}, key=str(number), at_once=True)
    sequence()
    consumer_runtime().run_once()
    registry.unregister_all()


def test_the_first_group_of_a_topic_is_not_warned_about() -> None:
    subscribe("shipping")
    publish("orders", {}, at_once=True)
    sequence()
    assert warned() == []


@pytest.mark.usefixtures("_history")
def test_another_name_is_warned_about_by_the_check_and_at_the_start(caplog: pytest.LogCaptureFixture) -> None:
    subscribe("dispatch")
    [found] = warned()
    assert (
        "'dispatch' is new to the topic 'orders'. The group will handle all messages of the topic, about 3, "
        in found.msg
    )
    assert "'shipping'" in found.msg
    assert found.hint is not None
    assert "start='earliest'" in found.hint
    assert "is 'shipping' under another name, give it the former name" in found.hint
    with caplog.at_level(logging.WARNING):
        runtime = consumer_runtime()
    assert "is 'shipping' under another name" in caplog.text
    runtime.run_once()
    assert warned() == [], "it is not new any more"


@pytest.mark.usefixtures("_history")
@pytest.mark.parametrize("start", ["earliest", "latest"])
def test_a_group_with_a_declared_start_is_not_warned_about(start: str, caplog: pytest.LogCaptureFixture) -> None:
    subscribe("dispatch", start=start)
    assert warned() == []
    with caplog.at_level(logging.WARNING):
        consumer_runtime()
    assert caplog.text == ""


@pytest.mark.usefixtures("_history")
def test_a_new_group_is_not_taken_for_one_that_still_exists() -> None:
    subscribe("shipping")
    subscribe("points")
    [found] = warned()
    assert "'points'" in found.msg
    assert found.hint is not None
    assert "another name" not in found.hint
