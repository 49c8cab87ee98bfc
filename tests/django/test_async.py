"""apublish and its kin: in the transaction of the async code around them, and safe under ASGI."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
from asgiref.sync import async_to_sync
from django.core.exceptions import SynchronousOnlyOperation
from django.db import transaction
from django.http import HttpRequest, HttpResponse
from django.test import AsyncClient, override_settings
from django.urls import path as route

from outbox import Delivery
from outbox.contrib.django import (
    apublish,
    apublish_many,
    apublish_messages,
    message,
    publish,
    subscriber,
    transactional_message,
)
from outbox.errors import TransactionUsageError, UnknownTopic
from tests.django.shop.models import Order
from tests.django.state import decisions
from tests.django.test_inbox import HANDLED, delivery, run
from tests.django.urls import Refused

pytestmark = pytest.mark.usefixtures("empty_log")


async def place(request: HttpRequest, number: str) -> HttpResponse:
    """Async Django has no transactions: each statement, and each message, is its own transaction."""
    await Order.objects.acreate(number=number)
    await apublish("orders", {}, key=number, at_once=True)
    return HttpResponse(status=201)


@transactional_message("orders", key=lambda number: number, body={})
async def place_with_details(number: str) -> None:
    await Order.objects.acreate(number=number)
    await apublish_many("payments", [{}, {}], key=f"{number}-payment")
    await apublish_messages([message("orders", {}, key=f"{number}-more")])
    if number == "bad":
        raise Refused


urlpatterns = [route("place/<number>", place)]


def test_it_joins_the_transaction_of_a_decorated_coroutine(path: str) -> None:
    async_to_sync(place_with_details)("good")
    with pytest.raises(Refused):
        async_to_sync(place_with_details)("bad")
    assert {key for key, state in decisions().items() if state == "C"} == {"good", "good-payment", "good-more"}


@pytest.mark.usefixtures("no_subscribers")
def test_it_joins_the_transaction_of_an_async_subscriber(path: str) -> None:
    @subscriber("orders", group="effects")
    async def effect(given: Delivery) -> None:
        await Order.objects.acreate(number=given.key)
        await apublish("payments", {}, key=given.key)
        if given.key == "bad":
            raise Refused

    [good], [bad] = run([delivery("good")]), run([delivery("bad")])
    assert good == HANDLED
    assert isinstance(bad, Refused)
    assert {key for key, state in decisions().items() if state == "C"} == {"good"}
    assert [order.number for order in Order.objects.all()] == ["good"]


@pytest.mark.usefixtures("no_subscribers")
@pytest.mark.parametrize("is_awaited", [False, True])
def test_a_task_of_an_async_subscriber_is_not_forgotten(is_awaited: bool) -> None:
    """The message would count as handled, and asyncio cancels what the task still has to do."""

    async def later(key: str) -> None:
        await asyncio.sleep(0)
        await apublish("orders", {}, key=key)

    @subscriber("orders", group="effects")
    async def effect(given: Delivery) -> None:
        await Order.objects.acreate(number=given.key)
        task = asyncio.create_task(later(f"{given.key}-later"))
        if is_awaited:
            await task

    [result] = run([delivery("one")])
    assert (result is HANDLED) == Order.objects.filter(number="one").exists() == is_awaited
    assert is_awaited or isinstance(result, TransactionUsageError)
    assert {key for key, state in decisions().items() if state == "C"} == ({"one-later"} if is_awaited else set())


@pytest.mark.usefixtures("no_subscribers")
def test_a_task_that_an_async_subscriber_has_cancelled_is_not_left_behind() -> None:
    @subscriber("orders", group="effects")
    async def effect(given: Delivery) -> None:
        tasks = [asyncio.create_task(asyncio.sleep(seconds)) for seconds in (0, 60)]
        _, pending = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in pending:
            task.cancel()

    assert run([delivery("one")]) == [HANDLED]


def test_in_a_coroutine_publish_names_the_async_function(path: str) -> None:
    async def handler() -> None:
        publish("orders", {})

    with pytest.raises(SynchronousOnlyOperation, match=r"await apublish\(…\)"):
        async_to_sync(handler)()

    async def right() -> None:
        await apublish("orders", {}, key="right")

    with transaction.atomic():
        async_to_sync(right)()
        assert decisions() == ({"right": None} if path == "two_phase" else {})
    assert decisions() == {"right": "C"}


@pytest.fixture
def routes() -> Iterator[None]:
    """The views of this module."""
    with override_settings(ROOT_URLCONF=__name__):
        yield


@pytest.mark.usefixtures("routes")
def test_requests_side_by_side_in_one_loop() -> None:
    async def requests() -> set[int]:
        client = AsyncClient()
        responses = await asyncio.gather(*(client.post(f"/place/n{number}") for number in range(10)))
        return {response.status_code for response in responses}

    assert async_to_sync(requests)() == {201}
    assert decisions() == {f"n{number}": "C" for number in range(10)}


def test_errors_and_names_are_those_of_the_plain_calls() -> None:
    with pytest.raises(UnknownTopic):
        async_to_sync(apublish)("nowhere", {}, at_once=True)
    assert apublish.__name__ == "apublish"
    assert apublish.__wrapped__ is publish  # type: ignore[attr-defined]
