"""`@transactional_message(messages=…)`: a function whose transaction carries several messages, or none."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, cast
from uuid import UUID

import psycopg
import pytest
from django.db import DatabaseError, connection
from psycopg.sql import SQL, Identifier

from outbox import Message
from outbox.contrib.django import message, run_check_back, transactional_message
from outbox.contrib.django.database.aliases import alias_conninfo
from outbox.contrib.django.engine.broker import flush
from outbox.contrib.django.models import LedgerEntry
from outbox.contrib.django.settings.conf import get_settings
from outbox.errors import ConfigurationError, TransactionUsageError, UsageError
from outbox.utils import faults
from tests.django.shop.models import Order
from tests.django.state import decisions, stored
from tests.django.urls import Refused

pytestmark = pytest.mark.usefixtures("empty_log")


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
    faults.arm("producer.before_end=raise")
    try:
        place("a")
        flush(within_seconds=5)
    finally:
        faults.arm("")
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
        connection.cursor().execute("ROLLBACK; BEGIN")

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
