"""Open transactions in the broker: listed, described, aborted, browsed past; and they delay no other transaction."""

from __future__ import annotations

from collections.abc import Callable

import psycopg
import pytest
from django.core.management import CommandError, call_command
from django.db import transaction

from outbox import Delivery
from outbox.contrib.django import (
    message,
    publish,
    publish_messages,
    run_check_back,
    subscriber,
)
from outbox.contrib.django.database.aliases import alias_conninfo
from outbox.contrib.django.engine.broker import flush
from outbox.contrib.django.settings.conf import get_settings
from outbox.contrib.django.worker.drain import drain
from tests.broker.support import let_time_pass
from tests.django.state import rolled_back
from tests.django.support import call, call_json
from tests.django.threads import in_thread

pytestmark = pytest.mark.usefixtures("empty_log")


def test_open_ones_are_listed_before_and_after_the_half_scan() -> None:
    with rolled_back():
        publish_messages([message(topic, 1, key="a") for topic in ("orders", "steps", "orders")])
    publish("orders", 1, key="decided", at_once=True)
    with transaction.atomic():
        publish("orders", 1, key="running")
        [new, other] = call_json("outbox_transaction", "list")
        assert (new["state"], new["messages"], new["topics"]) == ("new", 3, ["orders", "steps"])
        assert call_json("outbox_transaction", "list", "--limit", "1", "--after", new["transaction_id"]) == [other]
        assert "may be more" in call("outbox_transaction", "list", "--limit", "1")
        in_thread(run_check_back)
        [waiting] = call_json("outbox_transaction", "list")
        assert (waiting["transaction_id"], waiting["state"]) == (other["transaction_id"], "waiting")
        assert "still running" in waiting["last_answer"]
    assert call_json("outbox_transaction", "list", "--group", "nobody") == []
    flush(within_seconds=10)
    assert call_json("outbox_transaction", "list") == []


def test_browsing_shows_what_is_committed_and_with_uncommitted_the_rest(path: str) -> None:
    publish("orders", {"n": 1}, key="sent", at_once=True)
    with rolled_back():
        publish("orders", {"n": 2}, key="lost")
    publish("payments", {"n": 3}, key="elsewhere", at_once=True)
    assert [(one["key"], one["state"], one["body"]) for one in call_json("outbox_message", "list", "orders")] == [
        ("sent", "committed", '{"n":1}')
    ]
    every = call_json("outbox_message", "list", "orders", "--uncommitted")
    expected = {"sent": "committed", "lost": "undecided"} if path == "two_phase" else {"sent": "committed"}
    assert {one["key"]: one["state"] for one in every} == expected


def test_browsing_goes_page_by_page_and_moves_nothing() -> None:
    for number in range(5):
        publish("orders", number, key=number, at_once=True)
    first = call_json("outbox_message", "list", "orders", "--limit", "2")
    rest = call_json("outbox_message", "list", "orders", "--after", str(first[-1]["log_id"]))
    assert [one["key"] for one in first + rest] == list("43210")
    assert f"--after {first[-1]['log_id']}" in call("outbox_message", "list", "orders", "--limit", "2")
    assert call_json("outbox_message", "list", "orders", "--since", "2999-01-01T00:00:00+00:00") == []
    with pytest.raises(CommandError, match="nowhere"):
        call_command("outbox_message", "list", "nowhere")


def grown_old(seconds: float) -> None:
    """Make all stored rows that much older, as if time had passed."""
    run_check_back()
    with psycopg.connect(alias_conninfo(get_settings().broker), autocommit=True) as broker:
        let_time_pass(broker, seconds)
    run_check_back()


@pytest.fixture
def seen(no_subscribers: None) -> list[str]:
    """Keys in the order in which a handler of all three topics got them."""
    found: list[str] = []

    def handle(delivery: Delivery) -> None:
        found.append(delivery.key)

    for topic in ("orders", "payments", "steps"):
        subscriber(topic, group="reader")(handle)
    drain()
    return found


AGES = pytest.mark.parametrize("age_seconds", [0, 70, 100 * 3600])


@AGES
def test_an_open_local_transaction_delays_no_other(age_seconds: float, seen: list[str]) -> None:
    others = [f"other-{number}" for number in range(20)]

    def publish_others() -> None:
        if age_seconds:
            grown_old(age_seconds)
        for number, key in enumerate(others):
            publish(("orders", "payments", "steps")[number % 3], 1, key=key, at_once=True)
        drain()

    with transaction.atomic():
        publish_messages([message(topic, 1, key="open") for topic in ("orders", "steps")])
        in_thread(publish_others)
        # The transaction is open, and everything sent after it has been handled.
        assert sorted(seen) == sorted(others)
    drain()
    assert sorted(seen) == sorted([*others, "open", "open"])


@AGES
def test_an_abandoned_half_delays_no_other(
    age_seconds: float, seen: list[str], outbox_settings: Callable[..., None]
) -> None:
    """Its process is gone, and no process of its group answers: it stays open."""
    outbox_settings(PRODUCER_GROUP="gone")
    with rolled_back():
        left = publish("steps", 1, key="left")
    outbox_settings(PRODUCER_GROUP="shop")
    if age_seconds:
        grown_old(age_seconds)
    for number in range(20):
        publish("steps", 1, key=f"other-{number}", at_once=True)
    drain()
    assert sorted(seen) == sorted(f"other-{number}" for number in range(20))
    assert [one["transaction_id"] for one in call_json("outbox_transaction", "list")] == [str(left.transaction_id)]
