"""Handlers with unusual errors, statements, connections and callbacks, in a shared transaction."""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import Any

import pytest
from django.db import OperationalError, connection, connections, transaction

from outbox import Delivery
from outbox.errors import PermanentError
from tests.django.shop.models import Order, Payment
from tests.django.test_inbox import effects
from tests.django.test_shared_transactions import (
    ALONE,
    HANDLED,
    SKIPPED,
    alone,
    deliveries,
    handle_with,
    holding,
    share,
)
from tests.django.urls import Refused

pytestmark = pytest.mark.usefixtures("databases", "no_subscribers", "calls_share")


def test_a_skipped_message_is_not_given_up_when_the_transaction_fails() -> None:
    handle_with(lambda given: Payment.objects.create(reference="same") if given.key in "cd" else None)
    given = deliveries("a", "b", "c", "d")
    assert alone(given[1]) is HANDLED
    results, _ = share(*given)
    assert results == [ALONE, SKIPPED, ALONE, ALONE]


@pytest.mark.parametrize("error", [SystemExit("x"), KeyboardInterrupt(), asyncio.CancelledError()])
def test_a_callback_that_ends_the_thread_harms_its_own_message_only(error: BaseException) -> None:
    ran: list[str] = []

    def callback(key: str) -> None:
        ran.append(key)
        if key == "a":
            raise error

    handle_with(lambda given: transaction.on_commit(lambda: callback(given.key)))
    results: list[Any] = []
    try:
        results, _ = share(*deliveries("a", "b", "c"))
    except BaseException as escaped:
        # Caller._run_shared would charge the last message.
        results.append(repr(escaped))
    assert results == [HANDLED] * 3
    assert ran == ["a", "b", "c"]


def test_a_commit_by_hand_does_not_take_the_callbacks_of_earlier_messages() -> None:
    ran: list[str] = []

    def commit(given: Delivery) -> None:
        transaction.on_commit(lambda: ran.append(given.key))
        if given.key == "c":
            connection.connection.execute("COMMIT")
            raise Refused

    handle_with(commit)
    results, _ = share(*deliveries("a", "b", "c"))
    assert results[:2] == [HANDLED] * 2
    assert ran == ["a", "b"]


@pytest.mark.parametrize("how", ["iterator", "callproc", "quoted"])
def test_a_swallowed_lock_timeout_outside_of_execute(how: str) -> None:
    Order.objects.create(number="busy")
    with connection.cursor() as cursor:
        cursor.execute(
            "CREATE OR REPLACE FUNCTION hostile_lock() RETURNS integer LANGUAGE sql VOLATILE AS "
            "'UPDATE shop_order SET status = status RETURNING 1'"
        )
    branches: list[str] = []

    def update(given: Delivery) -> None:
        if given.key != "busy":
            return
        try:
            with transaction.atomic():
                if how == "iterator":
                    list(Order.objects.filter(number="busy").select_for_update().iterator(chunk_size=1))
                elif how == "callproc":
                    with connection.cursor() as cursor:
                        cursor.callproc("hostile_lock", [])
                else:
                    Order.objects.filter(number="busy").update(status="1")
            branches.append("locked")
        except OperationalError:
            branches.append("gave up")

    handle_with(update)
    given = deliveries("a", "busy")
    with holding("busy"):
        assert share(*given)[0] == [HANDLED, ALONE]
    assert alone(given[1]) is HANDLED
    assert branches == ["gave up", "locked"]


@pytest.mark.parametrize("fails", [True, False])
def test_a_pipeline_left_open_harms_no_other_message(fails: bool) -> None:
    def leave_open(given: Delivery) -> None:
        if given.key == "bad":
            connection.connection.pipeline().__enter__()
            connection.connection.execute("SELECT 1")
            if fails:
                raise Refused

    handle_with(leave_open)
    given = deliveries("a", "bad")
    results, _ = share(*given)
    again = [alone(one) for one, result in zip(given, results, strict=True) if result is ALONE]
    print(results, again)
    assert alone(deliveries("next")[0]) is HANDLED
    assert {"a", "next"} <= set(effects())
    results, _ = share(*deliveries("x", "y"))


@pytest.mark.parametrize("how", ["close", "close_all", "terminate", "rollback", "rollback_begin", "raw_closed"])
@pytest.mark.parametrize("fails", [True, False])
def test_connection_abuse(how: str, fails: bool) -> None:
    def abuse(given: Delivery) -> None:
        if given.key != "b":
            return
        if how == "close":
            connection.close()
        elif how == "close_all":
            connections.close_all()
        elif how == "terminate":
            pid = connection.connection.info.backend_pid
            with connections["broker"].cursor() as cursor:
                cursor.execute("SELECT pg_terminate_backend(%s)", [pid])
            time.sleep(0.1)
        elif how == "rollback":
            connection.connection.execute("ROLLBACK")
        elif how == "rollback_begin":
            connection.connection.execute("ROLLBACK; BEGIN")
        elif how == "raw_closed":
            connection.connection.close()
        if fails:
            raise Refused

    handle_with(abuse)
    given = deliveries("a", "b", "c")
    results, more = share(*given)
    assert all(result in (HANDLED, ALONE) for result in results), results
    again = [alone(one) for one, result in zip(given, results, strict=False) if result is ALONE]
    assert again[0] is HANDLED
    for one in more.waiting:
        assert alone(one) is HANDLED
    assert {"a", "c"} <= set(effects())


@pytest.mark.parametrize("error", [SystemExit("x"), KeyboardInterrupt(), asyncio.CancelledError(), GeneratorExit()])
def test_base_exceptions_then_next_message_is_fine(error: BaseException) -> None:
    def fail(given: Delivery) -> None:
        transaction.on_commit(lambda: None)
        if given.key == "b":
            raise error

    handle_with(fail)
    given = deliveries("a", "b", "c")
    assert share(*given)[0] == [ALONE] * 2
    with pytest.raises(type(error)):
        alone(given[1])
    assert effects() == []
    assert connection.savepoint_ids == []
    assert share(*deliveries("x", "y"))[0] == [HANDLED] * 2


@pytest.mark.parametrize("error", [SystemExit("x"), asyncio.CancelledError()])
def test_a_commit_by_hand_before_the_thread_is_ended_is_no_success(error: BaseException) -> None:
    """Alone, too: the next attempt would find the inbox row, and skip the message without a word."""

    def commit(given: Delivery) -> None:
        if given.key == "b":
            connection.connection.execute("COMMIT")
            raise error

    handle_with(commit)
    results, _ = share(*deliveries("a", "b", "c"))
    assert results[0] is HANDLED
    assert isinstance(results[1], PermanentError) and "ended its transaction by hand" in str(results[1])
    assert isinstance(alone(deliveries("b")[0]), PermanentError)


@pytest.mark.parametrize("error", [SystemExit("x"), asyncio.CancelledError()])
def test_a_callback_that_ends_the_thread_of_a_lone_message(error: BaseException) -> None:
    def fail() -> None:
        raise error

    handle_with(lambda given: transaction.on_commit(fail))
    assert alone(deliveries("a")[0]) is HANDLED


@pytest.mark.parametrize("key", ["a", "b", "c"])
def test_inner_block_without_savepoint_swallowed(key: str) -> None:
    def fail(given: Delivery) -> None:
        if given.key == key:
            try:
                with transaction.atomic(savepoint=False):
                    raise Refused
            except Refused:
                pass

    handle_with(fail)
    given = deliveries("a", "b", "c")
    results, _more = share(*given)
    if key == "a":
        assert len(results) == 1 and isinstance(results[0], Exception)
    else:
        assert ALONE in results
        assert all(result in (HANDLED, ALONE) for result in results)


def test_two_transactions_with_hand_made_commit_begin() -> None:
    def commit(given: Delivery) -> None:
        if given.key in "ac":
            connection.connection.execute("COMMIT; BEGIN")

    handle_with(commit)
    given = deliveries("a", "b", "c", "d")
    assert share(*given)[0] == [HANDLED] * 4
    assert effects() == ["a", "b", "c", "d"]


def test_nested_publish_that_fails_is_swallowed() -> None:
    from outbox.contrib.django import publish

    def bad(given: Delivery) -> None:
        publish("payments", {}, key=given.key)
        if given.key == "b":
            with contextlib.suppress(Exception):
                publish("no such topic", {})

    handle_with(bad)
    given = deliveries("a", "b", "c")
    assert share(*given)[0] == [HANDLED, ALONE]
    assert isinstance(alone(given[1]), Exception)
    assert effects() == ["a"]
