"""Broken exceptions of handlers and look-ups: each fails its own message or transaction, in every form of handler."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, BinaryIO
from uuid import UUID

import pytest

from outbox import Check, Delivery, Message
from outbox.checkback import CheckBack
from outbox.codec import Codecs, UnreadBody
from outbox.contrib.django import subscriber
from outbox.contrib.django.subscribers import registry
from outbox.contrib.django.subscribers.inbox import InboxInvoker
from outbox.contrib.django.subscribers.outside import HandlerInvoker
from outbox.errors import MissingBody, PartialFailure
from outbox.memory import InMemoryBroker
from outbox.ports import Disposition
from outbox.utils.ids import uuid7
from outbox.utils.safe_text import LONGEST_TEXT, error_line, printable
from tests.django.shop.models import Effect
from tests.hostile import FAILURES, BrokenText, Value

pytestmark = pytest.mark.usefixtures("application", "no_subscribers", "no_claims")

MASKED = {"*": frozenset({"iban"})}


def delivery(key: str) -> Delivery:
    message = Message(topic="orders", body=b"{}", key=key, message_id=uuid7())
    return Delivery(message=message, body={"iban": "DE12"}, group="effects", queue="orders/0", offset=0)


def call(given: Sequence[Delivery]) -> list[Any]:
    """Hand deliveries to the registered subscriber, as the dispatcher does."""
    [registered] = registry.subscribers()
    subscription = registered.subscription
    if subscription.effects == "outside":
        claiming = HandlerInvoker(masked_fields=MASKED)
        results: Sequence[Any] = [
            claiming.claim(subscription, registered.handler, one, lambda term: None, generation=1) for one in given
        ]
    else:
        results = InboxInvoker(masked_fields=MASKED)(subscription, registered.handler, given, generation=1)
    return list(subscription.contained(results))


@pytest.mark.parametrize("form", ["plain", "batch", "partial", "outside", "without an inbox"])
def test_a_broken_exception_fails_its_own_message(form: str) -> None:
    forms: dict[str, dict[str, Any]] = {
        "plain": {},
        "batch": {"batch": 10},
        "partial": {"batch": 10},
        "outside": {"effects": "outside"},
        "without an inbox": {"idempotent": False},
    }

    @subscriber("orders", group="effects", using="default", **forms[form])
    def effect(given: Any) -> None:
        errors: dict[Any, Any] = {}
        for one in given if isinstance(given, list) else [given]:
            if form == "partial" and one.key in FAILURES:
                errors[one.message_id] = FAILURES[one.key]()
            elif one.key in FAILURES:
                raise FAILURES[one.key]()
            elif form != "outside":
                Effect.objects.create(number=one.key)
        if errors:
            raise PartialFailure(errors)

    for name in FAILURES:
        together = [delivery(name), delivery("good")] if form == "partial" else [delivery(name)]
        failed, *rest = call(together)
        assert isinstance(failed, Exception), name
        assert len(error_line(failed)) < LONGEST_TEXT + 300
        shown = printable(failed)
        assert logging.Formatter().formatException((type(shown), shown, shown.__traceback__))
        assert rest == ([Disposition.HANDLED] if form == "partial" else [])
    assert call([delivery("last")]) == [Disposition.HANDLED]


def test_a_text_in_the_place_of_an_error_is_a_failure() -> None:
    @subscriber("orders", group="effects", using="default", batch=10)
    def effect(given: Sequence[Delivery]) -> None:
        raise PartialFailure({given[0].message_id: "no such order", given[1].message_id: Value()})  # type: ignore[dict-item]

    first, second, third = call([delivery("a"), delivery("b"), delivery("c")])
    assert isinstance(first, Exception) and "'no such order'" in error_line(first)
    assert isinstance(second, Exception) and "whose __repr__ raised LookupError" in error_line(second)
    assert third is Disposition.HANDLED


def test_a_body_that_cannot_be_read_fails_its_own_message() -> None:
    """The values of masked fields are looked for in all bodies of the call."""

    def missing() -> BinaryIO:
        raise MissingBody

    @subscriber("orders", group="effects", using="default", batch=10)
    def effect(given: Sequence[Delivery]) -> None:
        errors: dict[UUID, Exception] = {}
        for one in given:
            try:
                Effect.objects.create(number=one.body["iban"])
            except MissingBody as error:
                errors[one.message_id] = error
        raise PartialFailure(errors)

    unread = replace(delivery("bad"), body=UnreadBody("application/json", missing, Codecs().decode))
    handled, failed = call([delivery("good"), unread])
    assert handled is Disposition.HANDLED and isinstance(failed, MissingBody)


def test_a_value_that_cannot_be_masked_hides_the_text_of_its_error_only() -> None:
    @subscriber("orders", group="effects", using="default")
    def effect(given: Delivery) -> None:
        given.body["iban"] = Value()
        raise ValueError("no account DE12")

    [failed] = call([delivery("one")])
    assert isinstance(failed, ValueError) and "DE12" not in error_line(failed)


def test_a_broken_checker_leaves_the_pass_alive() -> None:
    class Checker:
        def check_local_transactions(self, checks: Sequence[Check]) -> Any:
            raise BrokenText

    assert CheckBack(InMemoryBroker(), "shop", Checker()).run_once().unknown == 0
