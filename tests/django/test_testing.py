"""The test helpers, inside TestCase and outside."""

from __future__ import annotations

import contextlib
from concurrent.futures import ThreadPoolExecutor

import pytest
from django.db import connection, transaction
from django.test import TestCase

from outbox import Delivery
from outbox.contrib.django import fenced_producer, message, publish, subscriber, transactional_message
from outbox.contrib.django.testing import OutboxTestMixin, in_memory_outbox
from outbox.errors import TransactionUsageError, UnknownTopic, UsageError
from tests.django.shop.models import Effect, Order
from tests.django.state import rolled_back, savepoint
from tests.django.threads import Other
from tests.django.urls import Refused


@pytest.fixture(autouse=True)
def _subscribers(no_subscribers: None, django_db_setup: None) -> None:
    @subscriber("orders", group="effects")
    def effect(delivery: Delivery) -> None:
        Effect.objects.create(number=delivery.key)
        if delivery.tag == "chain":
            publish("payments", {}, key=delivery.key)
        if delivery.tag == "poison":
            raise Refused

    @subscriber("payments", group="effects")
    async def paid(delivery: Delivery) -> None:
        await Effect.objects.acreate(number=f"paid-{delivery.key}")


@transactional_message("orders", key=lambda number: number, body={}, tag="chain")
def place(number: str, *, fail: bool = False) -> None:
    Order.objects.create(number=number)
    if fail:
        raise Refused


class InsideTestCase(OutboxTestMixin, TestCase):
    """The transaction around each test never commits."""

    databases = {"default", "lite", "other"}  # noqa: RUF012

    def test_committed_messages_are_visible_and_drained_through_the_subscribers(self) -> None:
        place("kept")
        with pytest.raises(Refused):
            place("dropped", fail=True)
        assert [item.key for item in self.outbox.messages("orders")] == ["kept"]
        assert self.outbox.drain() == 2
        assert sorted(Effect.objects.values_list("number", flat=True)) == ["kept", "paid-kept"]

    def test_a_plain_atomic_block_that_rolls_back_takes_its_message_along(self) -> None:
        with rolled_back():
            publish("orders", {}, key="dropped")
        with transaction.atomic():
            publish("orders", {"n": 1}, key="kept")
            point = savepoint()
            publish("orders", {"n": 2}, key="undone")
            transaction.savepoint_rollback(point)
            assert self.outbox.messages("orders") == []
        assert self.outbox.bodies("orders") == [{"n": 1}]

    def test_errors_of_handlers_reach_the_test(self) -> None:
        publish("orders", {}, key="poison", tag="poison", at_once=True)
        with pytest.raises(Refused):
            self.outbox.drain()
        assert not Effect.objects.exists()
        self.outbox.broker.advance(3600)
        assert self.outbox.drain(raise_errors=False) == 1

    def test_a_newer_instance_of_a_producer_decides_what_the_older_one_published(self) -> None:
        older = fenced_producer("import")
        with transaction.atomic():
            older.publish_messages([message("orders", {}, key="kept")])
        fenced_producer("import", wait_seconds=0.2)
        assert [item.key for item in self.outbox.messages("orders")] == ["kept"]

    def test_errors_after_the_handler_reach_the_test(self) -> None:
        @subscriber("payments", group="careless")
        def careless(delivery: Delivery) -> None:
            with contextlib.suppress(UnknownTopic):
                publish("nowhere", {})

        publish("payments", {}, key="1", at_once=True)
        with pytest.raises(TransactionUsageError):
            self.outbox.drain()

    def test_a_conflict_that_a_repetition_cures_is_no_error(self) -> None:
        tries = []

        @subscriber("payments", group="conflicts")
        def conflict(delivery: Delivery) -> None:
            tries.append(delivery)
            if len(tries) == 1:
                with connection.cursor() as cursor:
                    cursor.execute("DO $$ BEGIN RAISE EXCEPTION 'conflict' USING ERRCODE = '40001'; END $$")

        publish("payments", {}, key="1", at_once=True)
        self.outbox.drain()
        assert len(tries) == 2
        assert self.outbox.redeliver(bypass_inbox=True) == 2


class WithARealBroker(TestCase):
    """A half message would outlive the test, so it is refused."""

    databases = {"default", "other", "lite"}  # noqa: RUF012

    def test_nothing_leaks_from_a_test(self) -> None:
        for within in (transaction.atomic, contextlib.nullcontext):
            with pytest.raises(UsageError, match="IN_MEMORY"), within():
                publish("orders", {}, key="leak", at_once=within is contextlib.nullcontext)
        with pytest.raises(UsageError, match="IN_MEMORY"):
            place("leak")


@pytest.mark.usefixtures("application")
@pytest.mark.parametrize("alias", ["default", "lite"])
def test_a_look_does_not_end_the_transaction_of_another_thread(alias: str) -> None:
    with in_memory_outbox() as outbox, ThreadPoolExecutor(1) as pool:
        with rolled_back(alias):
            publish("orders", {}, key="undone", using=alias)
        other = Other(pool, lambda: publish("orders", {}, key="kept", using=alias), using=alias)
        assert other.done.wait(60)
        assert outbox.messages("orders") == []
        other.end()
        assert [item.key for item in outbox.messages("orders")] == ["kept"]
