"""@transactional_message on functions, methods, views and coroutines."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any, cast

import pytest
from asgiref.sync import sync_to_async
from django.db import IntegrityError, connections, transaction
from django.test import Client

from outbox.contrib.django import transactional_message
from outbox.errors import ConfigurationError, SendFailed, UnknownTopic
from tests.django.shop.models import Order, Payment
from tests.django.state import decisions, stored
from tests.django.urls import Refused

pytestmark = pytest.mark.usefixtures("empty_log")


@transactional_message("orders", key=lambda number: number, body=lambda number: {"number": number})
def create(number: str, *, fail: bool = False) -> Order:
    order = Order.objects.create(number=number)
    if fail:
        raise Refused
    return order


class Till:
    """The decorator on a method."""

    def __init__(self, name: str) -> None:
        self.name = name

    @transactional_message("payments", key=lambda self: self.name, body=lambda self, amount=1: {"amount": amount})
    def pay(self, amount: int) -> int:
        Payment.objects.create(reference=self.name)
        return amount


def test_the_message_commits_with_the_function(path: str) -> None:
    assert create("kept").number == "kept"
    assert Till("till").pay(3) == 3
    assert decisions() == {"kept": "C", "till": "C"}


def test_an_exception_before_commit_is_reported_as_rollback_at_once(path: str) -> None:
    with pytest.raises(Refused):
        create("dropped", fail=True)
    assert decisions() == ({"dropped": "R"} if path == "two_phase" else {})
    assert [item.decided_by for item in stored()] == (["P"] if path == "two_phase" else [])
    assert not Order.objects.exists()


def test_set_rollback_is_reported_too(path: str) -> None:
    @transactional_message("orders", key="quiet", body={})
    def quiet() -> None:
        Order.objects.create(number="quiet")
        transaction.set_rollback(True)

    quiet()
    assert decisions() == ({"quiet": "R"} if path == "two_phase" else {})


def test_after_an_error_out_of_commit_the_database_decides(path: str) -> None:
    @transactional_message("payments", key="twice", body={})
    def pay() -> None:
        Payment.objects.create(reference="twice")

    Payment.objects.create(reference="twice")
    with pytest.raises(IntegrityError):
        pay()
    assert decisions() == ({"twice": "R"} if path == "two_phase" else {})


def test_the_database_is_read_again_after_the_connection_was_cut() -> None:
    @transactional_message("payments", key="cut", body={})
    def pay() -> None:
        Payment.objects.create(reference="cut")
        with connections["other"].cursor() as cursor:
            cursor.execute(
                "SELECT pg_terminate_backend(%s, 5000)", [connections["default"].connection.info.backend_pid]
            )

    with pytest.raises(SendFailed, match=r"the commit of .*pay was not done.*the connection"):
        pay()
    assert decisions() == {"cut": "R"}


def test_nested_decorators_stand_and_fall_with_their_savepoints(path: str) -> None:
    @transactional_message("orders", key="outer", body={})
    def outer() -> None:
        create("first")
        with pytest.raises(Refused):
            create("second", fail=True)
        create("third")

    outer()
    rolled_back: dict[str, str | None] = {"second": "R"} if path == "two_phase" else {}
    assert decisions() == {"outer": "C", "first": "C", "third": "C"} | rolled_back


def test_durable_refuses_to_be_nested() -> None:
    @transactional_message("orders", key="durable", body={}, durable=True)
    def durable() -> None:
        Order.objects.create(number="durable")

    durable()
    with pytest.raises(RuntimeError, match="durable"), transaction.atomic():
        durable()
    assert decisions() == {"durable": "C"}


def test_a_half_that_is_refused_means_the_function_is_not_run() -> None:
    ran: list[int] = []

    @transactional_message("nowhere", body={})
    def never() -> None:
        ran.append(1)

    with pytest.raises(UnknownTopic):
        never()
    assert ran == []


def test_views_and_atomic_requests(path: str) -> None:
    client = Client()
    connections["default"].settings_dict["ATOMIC_REQUESTS"] = True
    try:
        assert client.get("/decorated/kept").status_code == 201
        with pytest.raises(Refused):
            client.get("/decorated/dropped?fail=1")
    finally:
        connections["default"].settings_dict["ATOMIC_REQUESTS"] = False
    assert decisions() == ({"kept": "C", "dropped": "R"} if path == "two_phase" else {"kept": "C"})


def test_async_functions_side_by_side_in_one_loop() -> None:
    @transactional_message("orders", key=lambda number: number, body={})
    async def create_async(number: str) -> str:
        await Order.objects.acreate(number=number)
        await asyncio.sleep(0)
        if number.endswith("3"):
            raise Refused
        return number

    async def several() -> list[Any]:
        try:
            return await asyncio.gather(*(create_async(f"n{n}") for n in range(6)), return_exceptions=True)
        finally:
            await sync_to_async(connections.close_all)()

    results = asyncio.run(several())
    assert [result for result in results if isinstance(result, str)] == ["n0", "n1", "n2", "n4", "n5"]
    assert set(Order.objects.values_list("number", flat=True)) == {"n0", "n1", "n2", "n4", "n5"}
    assert decisions() == {f"n{n}": "R" if n == 3 else "C" for n in range(6)}


@pytest.mark.parametrize(
    ("decorate", "complaint"),
    [
        (
            lambda: transactional_message("orders", body={})(cast(Any, classmethod(lambda cls: None))),
            "stands above @classmethod",
        ),
        (lambda: transactional_message("orders", body={})(Till), "class-based view"),
        (lambda: transactional_message("orders", body=lambda nmae: {})(lambda name: None), "'nmae'.*name"),
        (lambda: transactional_message("orders", body={})(lambda result: None), "called 'result'"),
    ],
)
def test_what_cannot_work_is_refused_at_decoration(decorate: Callable[[], Any], complaint: str) -> None:
    with pytest.raises(ConfigurationError, match=complaint):
        decorate()


def test_generators_are_refused() -> None:
    def generator() -> Iterator[int]:
        yield 1

    with pytest.raises(ConfigurationError, match="generator"):
        transactional_message("orders", body={})(generator)
