"""Writes of a decorated function on another database than the transaction that decides about its message."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import pytest
from django.conf import settings as django_settings
from django.db import connections, transaction
from django.test.utils import override_settings
from psycopg import sql

from outbox.contrib.django import run_check_back, transactional_message
from outbox.errors import TransactionUsageError
from tests.django.shop.models import Order, Payment
from tests.django.state import decisions
from tests.django.urls import Refused


@pytest.fixture(autouse=True)
def _routed(empty_log: None) -> Iterator[None]:
    routers = ["tests.django.shop.routers.PaymentsElsewhere", *django_settings.DATABASE_ROUTERS]
    with override_settings(DATABASE_ROUTERS=routers):
        yield


def save() -> None:
    Payment.objects.create(reference="routed")


def in_a_block_of_its_own() -> None:
    with transaction.atomic(using="other"):
        save()


def raw(statement: str | sql.Composable) -> Callable[[], None]:
    def write() -> None:
        with connections["other"].cursor() as cursor:
            cursor.execute(statement)

    return write


@pytest.mark.parametrize(
    "write",
    [
        *(save, in_a_block_of_its_own),
        raw("-- a comment\nINSERT INTO shop_payment (reference) VALUES ('routed')"),
        raw(
            "/* a comment */ with new as (insert into shop_payment (reference) values ('routed') returning 1) table new"
        ),
        raw(sql.SQL("UPDATE shop_payment SET reference = {}").format("routed")),
    ],
)
def test_without_using_a_write_elsewhere_is_refused_before_it_is_executed(write: Callable[[], None]) -> None:
    """Also if the function swallows the error."""
    Payment.objects.create(reference="there")

    @transactional_message("orders", key="lost", body={})
    def pay(swallowed: type[Exception]) -> None:
        Order.objects.create(number="lost")
        with contextlib.suppress(swallowed):
            write()

    for swallowed in (Refused, TransactionUsageError):
        with pytest.raises(TransactionUsageError, match=r"pay wrote to 'other'.*'default'.*using='other'"):
            pay(swallowed)
    run_check_back()
    assert decisions() == {"lost": "R"}
    assert not Order.objects.exists()
    assert list(Payment.objects.values_list("reference", flat=True)) == ["there"]


def test_of_several_swallowed_writes_elsewhere_the_last_one_is_raised() -> None:
    @transactional_message("orders", key="lost", body={})
    def pay() -> None:
        for write in (save, raw("DELETE FROM shop_payment")):
            with contextlib.suppress(TransactionUsageError):
                write()

    with pytest.raises(TransactionUsageError, match=r"pay wrote to 'other' \(DELETE"):
        pay()


def test_using_names_the_transaction_that_decides() -> None:
    @transactional_message("payments", key=lambda reference: reference, body={}, using="other")
    def pay(reference: str, *, fail: bool = False) -> None:
        Payment.objects.create(reference=reference)
        if fail:
            raise Refused

    pay("kept")
    with pytest.raises(Refused):
        pay("dropped", fail=True)
    assert decisions() == {"kept": "C", "dropped": "R"}
    assert list(Payment.objects.values_list("reference", flat=True)) == ["kept"]


def test_using_may_also_say_that_other_writes_go_their_own_way() -> None:
    @transactional_message("orders", key="kept", body={}, using="default")
    def place() -> None:
        Order.objects.create(number="kept")
        save()

    place()
    assert decisions() == {"kept": "C"}
    assert Payment.objects.count() == 1


def test_a_nested_call_that_names_its_own_database_is_free_and_the_outer_one_watched_again() -> None:
    @transactional_message("payments", key="inner", body={}, using="other")
    def pay() -> None:
        save()

    @transactional_message("orders", key="outer", body={})
    def place() -> None:
        Order.objects.create(number="outer")
        pay()
        assert Payment.objects.count() == 1
        with pytest.raises(TransactionUsageError, match="'other'"):
            save()

    with pytest.raises(TransactionUsageError, match="'other'"):
        place()
    run_check_back()
    assert decisions() == {"outer": "R", "inner": "C"}
    Payment.objects.create(reference="outside of any call")
