"""Unique messages in a `TestCase` with the in-memory broker."""

from __future__ import annotations

from django.db import transaction
from django.test import TestCase

from outbox.contrib.django import publish
from outbox.contrib.django.testing import OutboxTestMixin
from outbox.contrib.unique import Unique
from tests.django.state import rolled_back


class TestInMemory(OutboxTestMixin, TestCase):
    """Each `TestCase` begins without keys."""

    databases = {"default", "lite", "other"}  # noqa: RUF012

    def test_a_unique_key_is_held_until_the_rollback(self) -> None:
        with rolled_back():
            publish("orders", {}, Unique("7", within=60), key="dropped")
        with transaction.atomic():
            first = publish("orders", {}, Unique("7", within=60), key="first")
        with transaction.atomic():
            second = publish("orders", {}, Unique("7", within=60), key="second")
        assert (first.duplicate_of, second.duplicate_of) == (None, first.message_id)
        assert [item.key for item in self.outbox.messages("orders")] == ["first"]

    def test_the_unique_key_of_another_test_is_free(self) -> None:
        self.test_a_unique_key_is_held_until_the_rollback()
