"""Tests of an imaginary application, for test_application_tests.py: the broker that each of them may reach."""

from __future__ import annotations

import threading
import unittest
import urllib.error
import urllib.request
from collections.abc import Callable

import pytest
from django.core.management import CommandError, call_command
from django.db import connections, transaction
from django.test import LiveServerTestCase, TransactionTestCase, override_settings

from outbox.contrib.django import publish
from outbox.contrib.django.testing import OutboxTestMixin
from outbox.contrib.django.worker.drain import drain
from outbox.contrib.django.worker.workers import run_all
from outbox.errors import ConfigurationError, OutboxError
from tests.django.sessions import close_sessions
from tests.django.shop.models import Order
from tests.django.state import decisions


def place() -> None:
    with transaction.atomic():
        Order.objects.create(number="leak")
        publish("orders", {}, key="leak")


def in_thread(work: Callable[[], object]) -> list[OutboxError]:
    errors: list[OutboxError] = []

    def run() -> None:
        try:
            work()
        except OutboxError as error:
            errors.append(error)
        finally:
            connections.close_all()

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return errors


class Plain(TransactionTestCase):
    """The broker is not among its databases."""

    def test_nothing_leaves(self) -> None:
        for work in (place, lambda: publish("orders", {}, key="leak", at_once=True), drain):
            with pytest.raises(ConfigurationError, match=r"IN_MEMORY.*'broker'.*databases"):
                work()
        assert not Order.objects.exists()

    def test_nor_from_a_thread(self) -> None:
        assert [type(error) for error in in_thread(lambda: publish("orders", {}, at_once=True))] == [ConfigurationError]

    def test_nor_do_commands_or_workers_work_there(self) -> None:
        with pytest.raises(CommandError, match="IN_MEMORY"):
            call_command("outbox_topic", "list")
        with pytest.raises(ConfigurationError, match="drain"):
            run_all(threading.Event())


class InMemory(OutboxTestMixin, TransactionTestCase):
    """As in the documentation."""

    def test_publishing(self) -> None:
        place()
        assert [item.key for item in self.outbox.messages("orders")] == ["leak"]


@override_settings(ROOT_URLCONF="tests.django.urls", ALLOWED_HOSTS=["*"], STATIC_URL="/static/")
class Live(LiveServerTestCase):
    """The server answers in threads of its own."""

    def test_a_view_cannot_publish(self) -> None:
        connections["default"].settings_dict["ATOMIC_REQUESTS"] = True
        try:
            with pytest.raises(urllib.error.HTTPError, match="500"):
                urllib.request.urlopen(f"{self.live_server_url}/create/leak", timeout=10)
        finally:
            connections["default"].settings_dict["ATOMIC_REQUESTS"] = False
        assert not Order.objects.exists()


class Unguarded(unittest.TestCase):
    """Django guards its own test cases only."""

    def test_publishing(self) -> None:
        with pytest.raises(ConfigurationError, match="IN_MEMORY"):
            publish("orders", {}, key="leak", at_once=True)


class WithItsOwnBroker(TransactionTestCase):
    """The runner has made a test database for the broker, and `migrate` has installed it there."""

    databases = {"default", "broker"}  # noqa: RUF012

    def test_publishing(self) -> None:
        self.addCleanup(close_sessions)
        assert str(connections["broker"].settings_dict["NAME"]).startswith("test_")
        place()
        publish("orders", {}, key="plain", at_once=True)
        assert in_thread(lambda: publish("orders", {}, key="thread", at_once=True)) == []
        assert decisions() == {"leak": "C", "plain": "C", "thread": "C"}
