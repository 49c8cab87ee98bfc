"""@transactional_message on functions, methods, views and coroutines."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any, cast
from uuid import UUID

import psycopg
import pytest
from asgiref.sync import sync_to_async
from django.db import DatabaseError, IntegrityError, connections, transaction
from django.test import Client
from psycopg.sql import SQL, Identifier

from outbox import Message
from outbox.contrib.django import message, run_check_back, transactional_message
from outbox.contrib.django.database.aliases import alias_conninfo
from outbox.contrib.django.engine.broker import flush
from outbox.contrib.django.models import LedgerEntry
from outbox.contrib.django.settings.conf import get_settings
from outbox.errors import ConfigurationError, OutboxError, SendFailed, TransactionUsageError, UnknownTopic, UsageError
from tests.django.shop.models import Order, Payment
from tests.django.state import decisions, execute, stored
from tests.django.support import end_messages_lost
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


def generator() -> Iterator[int]:
    yield 1


async def coroutine_body(number: str) -> dict[str, str]:
    return {"number": number}


def test_what_cannot_work_is_refused_at_decoration() -> None:
    given: list[tuple[dict[str, Any], Any, str]] = [
        ({}, classmethod(lambda cls: None), "stands above @classmethod"),
        ({}, Till, "class-based view"),
        ({}, generator, "generator"),
        ({}, lambda result: None, "called 'result'"),
        ({"body": lambda nmae: {}}, lambda name: None, "'nmae'.*name"),
        ({"body": dict}, create, "has no readable signature"),
        ({"body": lambda **rest: rest}, create, r"'\*\*rest'"),
        ({"body": coroutine_body}, create, "asynchronous"),
        ({"topic": "order paid"}, create, "order paid"),
        ({"delay": "5"}, create, "delay must be seconds"),
        ({"timeout": "5"}, create, "timeout must be seconds"),
        ({"delay": 5, "deliver_at": lambda: datetime.now(UTC)}, create, "not both"),
    ]
    for options, function, complaint in given:
        with pytest.raises(OutboxError, match=complaint):
            transactional_message(**{"topic": "orders", "body": {}, **options})(function)


# -- several messages, or none ----------------------------------------------------------------------


@transactional_message(
    messages=lambda number, steps=2: (
        [message("orders", {"number": number}, key=number)]
        + [message("steps", turn, key=f"{number}-{turn}") for turn in range(steps)]
    )
)
def place(number: str, steps: int = 2, *, fail: bool = False) -> str:
    Order.objects.create(number=number)
    if fail:
        raise Refused
    return f"placed {number}"


def announcements(result: Order) -> Iterator[Message]:
    yield message("orders", {"id": result.pk}, key=result.pk)
    if result.number != "quiet":
        yield message("payments", {"id": result.pk}, key=f"pay-{result.pk}")


@transactional_message(messages=announcements)
def place_and_yield(number: str) -> Order:
    return Order.objects.create(number=number)


def ledger_rows_of(call: Callable[[], object]) -> int:
    before = LedgerEntry.objects.count()
    call()
    return LedgerEntry.objects.count() - before


def test_all_are_committed_with_the_function_by_one_row_and_one_decision(path: str) -> None:
    assert ledger_rows_of(lambda: place("a")) == (1 if path == "two_phase" else 0)
    assert decisions() == {"a": "C", "a-0": "C", "a-1": "C"}
    with psycopg.connect(alias_conninfo(get_settings().broker)) as broker:
        found = broker.execute(SQL("SELECT count(*) FROM {}.op_log").format(Identifier(get_settings().schema)))
        assert found.fetchone() == (1,)


def test_none_is_seen_of_a_function_that_failed(path: str) -> None:
    with pytest.raises(Refused):
        place("dropped", fail=True)
    assert "C" not in decisions().values()
    assert {item.decided_by for item in stored()} == ({"P"} if path == "two_phase" else set())


def test_the_function_may_yield_what_it_makes_of_the_result() -> None:
    loud, quiet = place_and_yield("loud"), place_and_yield("quiet")
    assert decisions() == {str(loud.pk): "C", f"pay-{loud.pk}": "C", str(quiet.pk): "C"}


def test_a_lost_end_is_answered_by_check_back_for_all_of_them() -> None:
    with end_messages_lost():
        place("a")
    assert decisions() == {"a": None, "a-0": None, "a-1": None}
    run_check_back()
    assert set(decisions().values()) == {"C"}


@transactional_message(messages=lambda given: [given])
def place_given(given: Message, *, fail: bool = False) -> None:
    Order.objects.create(number=given.key)
    if fail:
        raise Refused


def test_a_message_that_a_failed_call_got_may_be_published_by_the_next_call() -> None:
    """The report of the rollback has no answer. Here it would arrive when the second call has committed."""
    given = message("orders", {}, key="g")
    with psycopg.connect(alias_conninfo("broker")) as slow:
        slow.execute("LOCK TABLE outbox.op_log IN SHARE MODE")
        with pytest.raises(Refused):
            place_given(given, fail=True)
        place_given(given)
    assert decisions() == {"g": "C"}
    assert Order.objects.count() == 1


@pytest.mark.parametrize(
    ("ahead", "is_random"), [(timedelta(0), False), (timedelta(days=1), False), (timedelta(0), True)]
)
def test_a_message_that_a_failed_call_got_is_rolled_back_by_check_back(ahead: timedelta, is_random: bool) -> None:
    """Also if the clock was ahead when the message was made, and was set back before the call, or its id is random."""
    given = message("orders", {}, key="g")
    if is_random:
        object.__setattr__(given, "message_id", UUID("ffffffff-ffff-4fff-bfff-ffffffffffff"))
    object.__setattr__(given, "born_at", given.born_at + ahead)
    with pytest.raises(Refused):
        place_given(given, fail=True)
    flush(within_seconds=5)
    assert run_check_back().rolled_back == 1
    assert decisions() == {"g": "R"}


def test_none_at_all_is_a_transaction_without_messages(path: str) -> None:
    @transactional_message(messages=list)
    def early() -> None:
        Order.objects.create(number="early")

    @transactional_message(messages=lambda result: [])
    def late() -> None:
        Order.objects.create(number="late")

    early()
    late()
    assert stored() == []
    assert Order.objects.count() == 2


def test_without_messages_too_a_transaction_that_was_ended_inside_is_an_error(path: str) -> None:
    @transactional_message(messages=list)
    def ended() -> None:
        execute("ROLLBACK; BEGIN")

    with pytest.raises((TransactionUsageError, DatabaseError)):
        ended()


def test_what_is_no_list_of_messages_is_refused_with_the_functions_name() -> None:
    one = message("orders", 1)
    wrong: list[Callable[..., Any]] = [lambda: one, lambda: 5, lambda: ["orders"], lambda: {"orders": 1}, lambda: None]
    for given in wrong:

        @transactional_message(messages=given)
        def place_wrong() -> None:
            Order.objects.create(number="dropped")

        with pytest.raises(
            UsageError, match=r"messages= of .*place_wrong: pass a list of messages made by message\(…\)"
        ):
            place_wrong()
        assert not Order.objects.exists()
        assert stored() == []


MISTAKES: list[tuple[dict[str, Any], str]] = [
    ({}, r"needs a topic and body=, or messages="),
    ({"topic": "orders"}, r"needs a topic and body=, or messages="),
    ({"body": {}}, r"needs a topic and body=, or messages="),
    ({"messages": list, "topic": "orders"}, r"cannot be used together with topic"),
    ({"messages": list, "body": None}, r"cannot be used together with body"),
    ({"messages": list, "key": "k", "delay": 3}, r"cannot be used together with delay, key"),
    ({"messages": []}, r"must be a function"),
]


def test_what_cannot_work_is_refused_when_it_is_declared() -> None:
    for given, error in MISTAKES:
        with pytest.raises(ConfigurationError, match=error):
            cast(Any, transactional_message)(**given)


def test_an_unknown_parameter_and_a_coroutine_are_refused_when_they_are_declared() -> None:
    async def later(number: str) -> list[Message]:
        return []

    def of_nobody(nobody: str) -> list[Message]:
        return []

    for wrong in (later, of_nobody):
        with pytest.raises(ConfigurationError, match=r"messages= of"):
            transactional_message(messages=cast(Any, wrong))(place_and_yield)
