"""Tests of an imaginary application with several databases, run by `manage.py test` in test_application_tests.py."""

from __future__ import annotations

import pytest
from django.db import connections, transaction
from django.test import TestCase, TransactionTestCase

from outbox.contrib.django import publish
from outbox.contrib.django.testing import OutboxBrokerTestMixin, OutboxTestMixin
from outbox.errors import ConfigurationError
from tests.django.shop.models import Effect, Order
from tests.django.state import rolled_back


def place(number: str) -> None:
    with transaction.atomic():
        Order.objects.create(number=number)
        publish("orders", {}, key=number)


def effects() -> list[str]:
    return sorted(Effect.objects.values_list("number", flat=True))


class InMemory(OutboxTestMixin, TestCase):
    """Only `default` is its database."""

    def test_it_asks_no_other_database(self) -> None:
        place("kept")
        with rolled_back():
            publish("orders", {}, key="undone")
        assert [item.key for item in self.outbox.messages("orders")] == ["kept"]
        assert self.outbox.drain() == 2
        assert effects() == ["kept", "step-kept"]

    def test_reset(self) -> None:
        place("gone")
        self.outbox.reset()
        assert self.outbox.messages("orders") == []
        assert self.outbox.drain() == 0


class InMemoryWithItsReplica(OutboxTestMixin, TestCase):
    """The replica sees nothing of the transaction around a test."""

    databases = {"default", "replica"}  # noqa: RUF012

    def test_publishing(self) -> None:
        assert connections["replica"].settings_dict["NAME"] == connections["default"].settings_dict["NAME"]
        place("kept")
        assert self.outbox.drain() == 2


class OnTheBroker(OutboxBrokerTestMixin, TransactionTestCase):
    """Every test begins with an empty broker, with any rows left by the test before."""

    databases = {"default", "broker"}  # noqa: RUF012

    def test_a_is_not_drained(self) -> None:
        place("a")
        assert [item.key for item in self.outbox.messages("orders")] == ["a"]

    def test_b_is_alone(self) -> None:
        place("b")
        publish("payments", {"amount": 7}, key="b", at_once=True)
        with rolled_back():
            publish("orders", {}, key="undone")
        assert self.outbox.bodies("payments") == [{"amount": 7}]
        # The payment fails first; order, step, and the payment twice.
        assert self.outbox.drain(raise_errors=False) == 4
        assert effects() == ["b", "payment-b", "step-b"]
        self.outbox.reset()
        assert self.outbox.messages("orders") == []

    def test_c_gets_the_error_of_a_handler(self) -> None:
        publish("payments", {}, key="c", at_once=True)
        with pytest.raises(RuntimeError, match="first attempt"):
            self.outbox.drain()


class WithoutTheBrokersDatabase(OutboxBrokerTestMixin, TransactionTestCase):
    """Mistakes that are easily made."""

    def setUp(self) -> None:
        with pytest.raises(ConfigurationError, match=r"'broker'.*databases"):
            super().setUp()

    def test_an_error_names_the_fault(self) -> None:
        assert not hasattr(self, "outbox")
