"""Values that publish refuses early, each with an error of outbox that says which value and why."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta, tzinfo
from decimal import Decimal
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from django.db import transaction

from outbox.contrib.django import message, publish, publish_many, publish_messages, subscriber
from outbox.contrib.django.subscribers.registry import subscribers
from outbox.contrib.django.testing import InMemoryOutbox, in_memory_outbox
from outbox.errors import ConfigurationError, InvalidSubscription, TransactionRequired, UsageError
from outbox.retry import RetryPolicy
from outbox.time_limit import TIMEOUT_HEADER
from tests.django.shop.models import Effect, Order
from tests.django.state import decisions
from tests.part_apps import has


def fail(*_: Any) -> Any:
    raise ZeroDivisionError("broken")


class Broken:
    """None of its methods works."""

    __repr__ = __str__ = __hash__ = __eq__ = __bool__ = __iter__ = __len__ = __float__ = fail


class BrokenText(str):
    __slots__ = ()
    __repr__ = __str__ = __hash__ = __eq__ = __format__ = __len__ = encode = fail  # type: ignore[assignment]


class BrokenInt(int):
    __repr__ = __str__ = fail


class BrokenFloat(float):
    __slots__ = ()
    __repr__ = __str__ = fail


class BrokenMapping(dict[str, str]):
    __repr__ = __iter__ = __len__ = items = keys = fail


class BrokenZone(tzinfo):
    utcoffset = dst = tzname = fail


class FarZone(tzinfo):
    def utcoffset(self, _: datetime | None) -> timedelta:
        return timedelta(days=3)

    dst = utcoffset

    def tzname(self, _: datetime | None) -> str:
        return "far"


NOW = datetime.now(UTC)
HUGE = 10**5_000
CYCLE: list[Any] = []
CYCLE.append(CYCLE)
DEEP: list[Any] = []
for _ in range(100_000):
    DEEP = [DEEP]
NAN, INFINITY = float("nan"), float("inf")

NO_TEXTS = ["a\x00b", "\ud800", "k" * 100_000, b"x", 1.5, NAN, True, [1], object(), type, Broken(), BrokenText("x")]
NO_TIMES = [NAN, INFINITY, -INFINITY, -1, -timedelta.resolution, 1e300, 10**400, "5", Decimal(5), Decimal("NaN"), True]
NO_TIMES += [[5], Broken(), BrokenFloat("nan"), BrokenInt(-5)]
REFUSED: dict[str, list[Any]] = {
    "key": [*NO_TEXTS, None, BrokenInt(5), HUGE],
    "tag": [*NO_TEXTS, None, 5, BrokenInt(5), HUGE, "a b"],
    "unique": [*NO_TEXTS, "", BrokenInt(5), HUGE],
    "delay": [*NO_TIMES, timedelta.max],
    "timeout": [*NO_TIMES, 0],
    "within": [*NO_TIMES, timedelta.max, 0],
    "immunity_seconds": [NAN, True, -1, HUGE, "5", Broken(), BrokenInt(-5)],
    "deliver_at": [
        *(NOW.replace(tzinfo=None), NOW.replace(tzinfo=BrokenZone()), NOW.replace(tzinfo=FarZone()), NOW.date()),
        datetime.max.replace(tzinfo=ZoneInfo("America/New_York")),
        datetime.min.replace(tzinfo=ZoneInfo("Asia/Tokyo")),
        *("now", 5, NAN, Broken()),
    ],
    "headers": [
        *([("a", "b")], "abc", 5, Broken(), BrokenMapping(a="x"), {str(number): "x" for number in range(100)}),
        *({"a": value} for value in ("x\x00", "\ud800", "x" * 100_000, 1, None, b"x", Broken(), BrokenText("x"))),
        *({name: "x"} for name in ("a\x00", "a b", "", 1, None)),
    ],
    "body": [
        *(object(), type, {1, 2}, b"x", NAN, INFINITY, HUGE, CYCLE, DEEP, "\ud800", {"\ud800": 1}, {object(): 1}),
        *("x" * 5_000_000, Broken(), [Broken()], {"a": Broken()}, BrokenMapping(a="x")),
        NOW.replace(tzinfo=BrokenZone()),
    ],
    "topic": ["", "a b", "x\x00", "\ud800", "x" * 100_000, b"x", None, 5, [1], type, Broken()],
    "using": ["", "nosuch", "x" * 100_000, 5, [], Broken()],
}  # fmt: skip


@pytest.fixture
def outbox(application: None) -> Iterator[InMemoryOutbox]:
    with in_memory_outbox() as found:
        yield found


def attempt(name: str, value: Any, *, at_once: bool = True) -> None:
    given: dict[str, Any] = {
        "topic": "reminders" if name in ("delay", "deliver_at") else "orders",
        "body": {},
        name: value,
    }
    options = []
    if name in ("unique", "within"):
        from outbox.contrib.unique import Unique

        options = [Unique(**{"key": "u", "within": 60, name.replace("unique", "key"): given.pop(name)})]
    publish(given.pop("topic"), given.pop("body"), *options, at_once=at_once, **given)


@transaction.atomic
def attempt_beside_a_row(name: str, value: Any) -> None:
    Order.objects.create(number="half")
    attempt(name, value, at_once=False)


def test_each_is_refused_by_an_error_of_outbox_that_can_be_read(outbox: InMemoryOutbox) -> None:
    for name, values in REFUSED.items():
        if name in ("unique", "within") and not has("unique"):
            continue
        for place, value in enumerate(values):
            what = f"{name} {place}: {type(value).__name__}"
            for call in (attempt, attempt_beside_a_row):
                with pytest.raises(UsageError) as refused:
                    call(name, value)
                text = str(refused.value)
                assert len(text) < 700 and "\x00" not in text, (what, text)
                assert not isinstance(refused.value, TransactionRequired), (what, text)
    assert not Order.objects.exists()
    assert outbox.messages("orders") == outbox.messages("reminders") == []


def test_the_error_names_the_argument_and_the_value() -> None:
    for name, value, said in (
        ("key", Broken(), "'orders': key <Broken, whose __repr__ raised ZeroDivisionError> is not allowed"),
        ("key", BrokenText("x"), "topic 'orders': a value of the message raised ZeroDivisionError: broken."),
        (
            "deliver_at",
            NOW.replace(tzinfo=BrokenZone()),
            "topic 'reminders': a value of the message raised ZeroDivision",
        ),
        ("body", [Broken()], "the body for topic 'orders' cannot be encoded as application/json"),
        ("delay", NAN, "topic 'reminders': delay must be seconds from now that end before the year 10000, got nan."),
        (
            "using",
            Broken(),
            "publish(…, using=<Broken, whose __repr__ raised ZeroDivisionError>): that alias is not in",
        ),
    ):
        with pytest.raises(UsageError) as refused:
            attempt(name, value)
        assert said in str(refused.value)


# -- other arguments --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"group": "x y"}, r"@subscriber\('orders', group='x y'\).*'x y' is not allowed"),
        ({"mode": "keyed"}, "mode='keyed' must be one of 'concurrent', 'orderly', 'key_ordered'"),
        ({"start": "yesterday"}, "start='yesterday' must be one of 'earliest', 'latest'"),
        ({"batch": 0}, "batch=0"),
        ({"threads": "8"}, "threads='8'"),
        ({"retry": 3}, "retry=3 must be a RetryPolicy"),
        ({"on_error": "skip"}, "on_error='skip' must map"),
        ({"on_error": {"ValueError": "retry_later"}}, "must map exception classes"),
        ({"on_error": {ValueError: "nope"}}, "on_error='nope' must be one of 'retry'"),
        ({"timeout_seconds": "a"}, "timeout_seconds='a'"),
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


def test_publish_refuses_before_anything_is_stored(empty_log: None) -> None:
    cases: list[tuple[Callable[[], object], str]] = [
        (lambda: publish("orders", {}, using="nosuch"), "'nosuch'.*not in DATABASES; use one of default"),
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
