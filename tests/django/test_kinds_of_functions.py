"""@transactional_message and @subscriber on everything that can be called: right, or refused when it is declared."""

from __future__ import annotations

import functools
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

import pytest
from asgiref.sync import async_to_sync
from django.http import HttpRequest, HttpResponse
from django.test import AsyncRequestFactory, RequestFactory
from django.utils.decorators import method_decorator
from django.views import View

from outbox import Delivery
from outbox.contrib.django import subscriber, transactional_message
from outbox.errors import TransactionUsageError, UsageError
from outbox.ports import Disposition
from tests.django.shop.models import Effect, Order
from tests.django.state import bodies, decisions, effects
from tests.django.test_inbox import delivery, run

pytestmark = pytest.mark.usefixtures("empty_log")


class Refused(Exception):
    """Rolls back."""


@method_decorator(
    transactional_message("orders", key=lambda number: number, body=lambda request, number: {"path": request.path}),
    name="post",
)
class Place(View):
    """Decorated from outside, with what the URL has in `**kwargs`."""

    def post(self, request: HttpRequest, **kwargs: Any) -> HttpResponse:
        Order.objects.create(number=kwargs["number"])
        if kwargs["number"] == "bad":
            raise Refused
        return HttpResponse(status=201)


def test_method_decorator_on_a_view() -> None:
    assert Place.as_view()(RequestFactory().post("/place"), number="good").status_code == 201
    with pytest.raises(Refused):
        Place.as_view()(RequestFactory().post("/place"), number="bad")
    assert {key: state for key, state in decisions().items() if state != "R"} == {"good": "C"}
    assert list(Order.objects.values_list("number", flat=True)) == ["good"]


class Counter:
    """A callable object."""

    def __call__(self, number: str) -> str:
        Order.objects.create(number=number)
        return number


class AsyncCounter:
    """One that is called asynchronously."""

    async def __call__(self, number: str) -> str:
        await Order.objects.acreate(number=number)
        return number


def create(number: str, prefix: str = "") -> str:
    Order.objects.create(number=prefix + number)
    return prefix + number


async def acreate(number: str) -> str:
    await Order.objects.acreate(number=number)
    return number


@pytest.mark.parametrize(
    "function", [Counter(), AsyncCounter(), functools.partial(create, prefix=""), functools.partial(acreate)]
)
def test_partials_and_callable_objects(function: Callable[..., Any]) -> None:
    decorated = transactional_message("orders", key=lambda number: number, body=lambda result: {"result": result})(
        function
    )
    result = decorated("one")
    assert (async_to_sync(_awaited)(result) if isinstance(result, Awaitable) else result) == "one"
    assert decisions() == {"one": "C"}
    assert bodies() == [{"result": "one"}]


async def _awaited(result: Awaitable[Any]) -> Any:
    return await result


class AsyncPlace(View):
    """A view whose `as_view()` is a plain function that Django has marked as asynchronous."""

    async def post(self, request: HttpRequest, number: str) -> HttpResponse:
        await Order.objects.acreate(number=number)
        if number == "bad":
            raise Refused
        return HttpResponse(status=201)


def test_an_async_view_is_awaited_inside_the_transaction() -> None:
    view: Any = transactional_message("orders", key=lambda number: number, body={})(AsyncPlace.as_view())

    async def requests() -> int:
        factory = AsyncRequestFactory()
        response = await view(factory.post("/"), number="good")
        with pytest.raises(Refused):
            await view(factory.post("/"), number="bad")
        return int(response.status_code)

    assert async_to_sync(requests)() == 201
    assert decisions() == {"good": "C", "bad": "R"}
    assert list(Order.objects.values_list("number", flat=True)) == ["good"]


def test_parts_find_what_was_passed_by_keyword() -> None:
    @transactional_message(
        "orders", key=lambda number: number, body=lambda args, currency="EUR": {"args": args, "currency": currency}
    )
    def pay(*args: int, **kwargs: Any) -> None: ...

    pay(1, 2, number="a", currency="CHF")
    pay(number="b")
    assert bodies() == [
        {"args": [1, 2], "currency": "CHF"},
        {"args": [], "currency": "EUR"},
    ]
    with pytest.raises(UsageError, match=r"key= of .*pay needs 'number'"):
        pay(1)


def lazy_generator(number: str) -> Iterator[Order]:
    yield Order.objects.create(number=number)


async def lazy_async_generator(number: str) -> AsyncIterator[Order]:
    yield await Order.objects.acreate(number=number)


LAZY: list[Callable[[str], Any]] = [lazy_generator, lazy_async_generator, acreate]


@pytest.mark.parametrize("lazy", LAZY)
@pytest.mark.parametrize("late", [False, True])
def test_work_that_is_still_to_be_done_at_commit_is_refused(lazy: Callable[[str], Any], late: bool) -> None:
    body: Any = (lambda result: {}) if late else {}

    @transactional_message("orders", key="never", body=body)
    def place(number: str) -> Any:
        Order.objects.create(number="before")
        return lazy(number)

    with pytest.raises(TransactionUsageError, match=r"place returned a (async_)?(generator|coroutine)"):
        place("after")
    assert decisions() == ({} if late else {"never": "R"})
    assert not Order.objects.exists()


@pytest.mark.usefixtures("no_subscribers")
@pytest.mark.parametrize("lazy", LAZY)
@pytest.mark.parametrize("idempotent", [True, False])
def test_a_handler_that_returns_unfinished_work_fails(lazy: Callable[[str], Any], idempotent: bool) -> None:
    @subscriber("orders", group="effects", idempotent=idempotent)
    def effect(given: Delivery) -> Any:
        return lazy(given.key)

    [result] = run([delivery("one")])
    assert isinstance(result, TransactionUsageError)
    assert "effect returned a" in str(result)


class Handler:
    """A callable object as a subscriber."""

    async def __call__(self, given: Delivery) -> None:
        await Effect.objects.acreate(number=given.key)


async def handle(given: Delivery, prefix: str) -> None:
    await Effect.objects.acreate(number=prefix + given.key)


@pytest.mark.usefixtures("no_subscribers")
@pytest.mark.parametrize("handler", [Handler(), functools.partial(handle, prefix="")])
def test_subscribers_may_be_partials_and_callable_objects(handler: Any) -> None:
    subscriber("orders", group="effects")(handler)
    assert run([delivery("one")]) == [Disposition.HANDLED]
    assert effects() == ["one"]
