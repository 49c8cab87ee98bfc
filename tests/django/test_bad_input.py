"""Wrong arguments in code are refused at once, with a text that names them, and without a partial effect."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from django.db import transaction

from outbox.contrib.django import message, publish, publish_many, publish_messages, subscriber, transactional_message
from outbox.contrib.django.subscribers.registry import subscribers
from outbox.errors import ConfigurationError, InvalidName, InvalidSubscription, UsageError
from outbox.retry import RetryPolicy
from outbox.time_limit import TIMEOUT_HEADER
from tests.django.shop.models import Effect
from tests.django.state import decisions


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"group": "x y"}, r"@subscriber\('orders', group='x y'\).*'x y' is not allowed"),
        ({"mode": "keyed"}, "mode='keyed' must be one of 'concurrent', 'orderly', 'key_ordered'"),
        ({"start": "yesterday"}, "start='yesterday' must be one of 'earliest', 'latest'"),
        ({"batch": 0}, "batch=0"),
        ({"batch": "2"}, "batch='2'"),
        ({"threads": "8"}, "threads='8'"),
        ({"retry": 3}, "retry=3 must be a RetryPolicy"),
        ({"on_error": "skip"}, "on_error='skip' must map"),
        ({"on_error": {"ValueError": "retry_later"}}, "must map exception classes"),
        ({"on_error": {ValueError: "nope"}}, "on_error='nope' must be one of 'retry'"),
        ({"suspend_seconds": -1}, "suspend_seconds=-1"),
        ({"timeout_seconds": "a"}, "timeout_seconds='a'"),
        ({"max_suspends": -1}, "max_suspends=-1"),
        ({"broadcast": "yes"}, "broadcast='yes'"),
        ({"nosuch": 1}, "no option nosuch.*broadcast"),
    ],
)
def test_subscription_that_cannot_work(no_subscribers: None, options: dict[str, Any], complaint: str) -> None:
    with pytest.raises(InvalidSubscription, match=complaint):
        subscriber("orders", **{"group": "effects", **options})
    assert not subscribers()


@pytest.mark.parametrize(("handler", "complaint"), [(lambda: None, "one argument"), (3, "takes a function, not 3")])
def test_handler_that_cannot_be_called(no_subscribers: None, handler: Any, complaint: str) -> None:
    with pytest.raises(InvalidSubscription, match=complaint):
        subscriber("orders", group="effects")(handler)
    assert not subscribers()


@pytest.mark.parametrize("options", [{"delays_seconds": 5}, {"delays_seconds": ["a"]}, {"max_attempts": "3"}])
def test_retry_policy_that_cannot_work(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match=next(iter(options))):
        RetryPolicy(**options)


@pytest.mark.parametrize(
    ("topic", "options", "error", "complaint"),
    [
        ("order paid", {}, InvalidName, "order paid"),
        ("orders", {"delay": "5"}, UsageError, "delay must be seconds"),
        ("orders", {"timeout": "5"}, UsageError, "timeout must be seconds"),
        ("orders", {"delay": 5, "deliver_at": lambda: datetime.now(UTC)}, UsageError, "not both"),
    ],
)
def test_decorator_refuses_at_import(topic: str, options: Any, error: type[Exception], complaint: str) -> None:
    with pytest.raises(error, match=complaint):
        transactional_message(topic, body={}, **options)


def test_publish_refuses_before_anything_is_stored(empty_log: None) -> None:
    cases: list[tuple[Callable[[], object], str]] = [
        (lambda: publish("orders", {}, using="nosuch"), "'nosuch'.*not in DATABASES; use one of default"),
        (lambda: publish("orders", {}, headers=["a"]), "headers must be a mapping"),  # type: ignore[arg-type]
        (lambda: publish("orders", {}, delay=float("nan")), "delay must be seconds from now"),
        (lambda: publish("orders", {}, delay=float("inf")), "delay must be seconds from now"),
        (lambda: publish("orders", {}, delay=1e12), "delay must be seconds from now"),
        (lambda: publish("orders", {}, timeout=0), "timeout must be longer than 0"),
        (lambda: publish("orders", {}, timeout=timedelta(seconds=-1)), "timeout must be longer than 0"),
        (lambda: publish("orders", {}, timeout=float("nan")), "timeout must be longer than 0"),
        (lambda: publish("orders", {}, timeout=1e300), "timeout must be longer than 0"),
        (lambda: publish("orders", {}, timeout=True), "timeout must be seconds"),
        (lambda: publish("orders", {}, headers={TIMEOUT_HEADER: "5"}, timeout=5), "not both"),
        (lambda: publish("orders", {}, headers={TIMEOUT_HEADER: "five"}), "positive number of seconds"),
        (lambda: publish_many("orders", [{"n": 1}], timeout=-1), "timeout must be longer than 0"),
        (lambda: publish_many("orders", {"n": 1}), "pass a list of bodies"),
        (lambda: publish_many("orders", "abc"), "pass a list of bodies"),
        (lambda: publish_messages(message("orders", {})), "pass a list of messages"),  # type: ignore[arg-type]
        (lambda: publish_messages([{"n": 1}]), "pass a list of messages"),  # type: ignore[list-item]
    ]
    for call, complaint in cases:
        with pytest.raises(UsageError, match=complaint):
            call()
        with pytest.raises(UsageError, match=complaint):
            _work_and(call)
        assert not Effect.objects.exists()
        assert decisions() == {}


@pytest.mark.usefixtures("empty_log")
def test_a_time_limit_beyond_the_retention() -> None:
    with pytest.raises(UsageError, match="keeps messages for"):
        _work_and(lambda: publish("orders", {}, timeout=30 * 86400))
    assert not Effect.objects.exists()


@transaction.atomic
def _work_and(call: Callable[[], object]) -> None:
    Effect.objects.create(number="half")
    call()
