"""A handler that changes its delivery and is called again: each call gets a body, headers and variables of its own."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Final

import pytest
from django.db import connections
from django.test.utils import override_settings

from outbox import Delivery, RetryPolicy
from outbox.contrib.django import ClaimedDelivery, publish, subscriber
from outbox.contrib.django.database.aliases import broker_connection
from outbox.contrib.django.subscribers import registry
from outbox.contrib.django.testing import in_memory_outbox
from outbox.contrib.django.worker.workers import consumer_runtime
from tests.django import configured
from tests.django.shop.models import Effect
from tests.django.support import sequence
from tests.django.urls import Refused
from tests.part_apps import has

pytestmark = pytest.mark.usefixtures("databases", "no_subscribers", "no_events")

_left: Final[ContextVar[str]] = ContextVar("left", default="nothing")


def effects() -> list[str]:
    return sorted(Effect.objects.values_list("number", flat=True))


def conflict() -> None:
    """A serialization failure, as PostgreSQL reports it."""
    with connections["default"].cursor() as cursor:
        cursor.execute("DO $$ BEGIN RAISE EXCEPTION 'conflict' USING ERRCODE = '40001'; END $$")


class Doubling:
    """Doubles the amount in place, leaves a variable behind, and calls `fail` in the first two calls."""

    def __init__(self, fail: Callable[[], None] = conflict) -> None:
        self._fail = fail
        self.calls = 0

    def __call__(self, body: dict[str, Any]) -> None:
        self.calls += 1
        body["amount"] *= 2
        Effect.objects.create(number=f"{body['amount']} {_left.get()}")
        _left.set("something")
        if self.calls <= 2:
            self._fail()


def on_the_broker() -> None:
    publish("orders", {"amount": 10}, key="one", at_once=True)
    sequence()
    consumer_runtime().run_once()


def in_memory() -> None:
    with in_memory_outbox() as outbox:
        publish("orders", {"amount": 10}, key="one", at_once=True)
        # The test's outbox also reports the errors of calls that were repeated.
        outbox.drain(raise_errors=False)


@dataclass
class Paid:
    amount: int


ENGINES: Final = (on_the_broker, in_memory)


@pytest.mark.skipif(not has("events"), reason="the tree has no typed events")
def test_a_typed_event_is_made_again() -> None:
    from outbox.events import event

    kind = event("account.paid", topic="orders")(Paid)
    for engine in ENGINES:
        calls: list[int] = []

        @subscriber(kind, group="accounts")
        def account(given: Delivery, calls: list[int] = calls) -> None:
            given.body.amount *= 2
            calls.append(given.body.amount)
            if len(calls) < 3:
                conflict()

        engine()
        assert calls == [20, 20, 20]
        registry.unregister_all()


def test_each_half_of_a_batch_gets_the_published_bodies() -> None:
    for is_in_memory in (False, True):
        calls: list[list[int]] = []

        @subscriber("orders", group="accounts", batch=4, on_error={Refused: "retry_later"})
        def account(given: list[Delivery], calls: list[list[int]] = calls) -> None:
            for one in given:
                one.body["amount"] *= 2
            calls.append([one.body["amount"] for one in given])
            if "poison" in {one.key for one in given}:
                raise Refused

        def place() -> None:
            for key in ("poison", "good"):
                publish("orders", {"amount": 10}, key=key, at_once=True)

        if is_in_memory:
            with in_memory_outbox() as outbox:
                place()
                outbox.drain(raise_errors=False)
        else:
            place()
            sequence()
            consumer_runtime().run_once()
        assert sorted(calls) == [[20], [20], [20, 20]]
        registry.unregister_all()


def test_a_redelivery_in_a_test_gets_the_published_body() -> None:
    @subscriber("orders", group="accounts")
    def account(given: Delivery) -> None:
        doubling(given.body)

    @subscriber("orders", group="charging", effects="outside")
    def charge(given: ClaimedDelivery) -> None:
        with given.finish():
            doubling(given.body)

    doubling = Doubling(lambda: None)
    with in_memory_outbox() as outbox:
        publish("orders", {"amount": 10}, key="one", at_once=True)
        outbox.drain()
        assert [outbox.redeliver(bypass_inbox=True) for _ in range(2)] == [2, 2]
    assert effects() == ["20 nothing"] * 6


def test_nobody_changes_the_headers_of_a_stored_message() -> None:
    headers = {"kind": "new"}
    seen: list[dict[str, str]] = []

    @subscriber("orders", group="accounts")
    def account(given: Delivery) -> None:
        seen.append(dict(given.headers))
        with pytest.raises(TypeError):
            given.headers["kind"] = "changed"  # type: ignore[index]

    @subscriber("orders", group="others")
    def other(given: Delivery) -> None:
        seen.append(dict(given.headers))

    with in_memory_outbox() as outbox:
        publish("orders", {}, key="one", headers=headers, at_once=True)
        headers["kind"] = "changed"
        outbox.drain()
    publish("orders", {}, key="one", headers={"kind": "new"}, at_once=True)
    sequence()
    consumer_runtime().run_once()
    assert seen == [{"kind": "new"}] * 4


def test_two_groups_of_a_process_share_no_body() -> None:
    for engine in ENGINES:
        seen: list[int] = []

        def double(given: Delivery, seen: list[int] = seen) -> None:
            given.body["amount"] *= 2
            seen.append(given.body["amount"])

        for group in ("first", "second"):
            subscriber("orders", group=group)(double)
        engine()
        assert seen == [20, 20]
        registry.unregister_all()


def test_a_masked_field_stays_masked_although_the_handler_removes_it() -> None:
    @subscriber("orders", group="accounts", retry=RetryPolicy(max_attempts=1))
    def account(given: Delivery) -> None:
        raise Refused(given.body.pop("card"))

    with override_settings(OUTBOX={**configured.OUTBOX, "MASKED_FIELDS": {"orders": ["card"]}}):
        publish("orders", {"card": "4111-1111"}, key="one", at_once=True)
        sequence()
        consumer_runtime().run_once()
    with broker_connection() as (connection, _):
        [(error,)] = connection.execute("SELECT error FROM outbox.dead_letter").fetchall()
    assert error.startswith("Refused")
    assert "4111" not in error
