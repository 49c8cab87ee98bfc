"""What a test publishes stays in the test, whatever comes first: the data of the class, a fixture, or the outbox."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

import pytest
from asgiref.sync import sync_to_async
from celery import Celery, chain
from django.db import transaction
from django.test import TestCase, TransactionTestCase, override_settings

from outbox import Delivery
from outbox.contrib.django import apublish, publish, subscriber
from outbox.contrib.django.celery import TransactionalTask, subscriber_task
from outbox.contrib.django.settings.conf import get_settings
from outbox.contrib.django.testing import InMemoryOutbox, OutboxTestMixin
from outbox.errors import InvalidSubscription
from tests.django.shop.models import Effect, Order
from tests.django.state import rolled_back


@pytest.fixture(autouse=True)
def _subscribers(no_subscribers: None, django_db_setup: None) -> None:
    _register()


def _register() -> None:
    @subscriber("orders", group="effects")
    def effect(delivery: Delivery) -> None:
        Effect.objects.create(number=delivery.key)


def place(number: str) -> None:
    with transaction.atomic():
        Order.objects.create(number=number)
        publish("orders", {}, key=number)


def keys(outbox: InMemoryOutbox) -> list[str]:
    return sorted(str(item.key) for item in outbox.messages("orders"))


class _Data:
    """Tests of a class with data; each must see them and nothing of the others, so each runs the same twice."""

    outbox: ClassVar[InMemoryOutbox]
    expected: ClassVar[list[str]]

    def check(self, mine: str) -> None:
        assert keys(self.outbox) == sorted([*self.expected, "own"])
        place(mine)
        with rolled_back():
            publish("orders", {}, key="undone")
        assert keys(self.outbox) == sorted([*self.expected, "own", mine])
        assert self.outbox.drain() == len(self.expected) + 2
        assert set(Effect.objects.values_list("number", flat=True)) == {*self.expected, "own", mine}
        self.outbox.broker.advance(5)

    def setUp(self) -> None:
        place("own")
        super().setUp()  # type: ignore[misc]

    def test_one(self) -> None:
        self.check("one")

    def test_two(self) -> None:
        self.check("two")

    async def test_async(self) -> None:
        await apublish("orders", {}, key="async", at_once=True)
        assert await sync_to_async(keys)(self.outbox) == sorted([*self.expected, "own", "async"])

    def test_a_replaced_setting_keeps_the_messages_here(self) -> None:
        with override_settings(OUTBOX={"BROKER": "broker", "TOPICS": {"orders": {}}}):
            place("elsewhere")
            assert keys(self.outbox) == ["elsewhere"]


@override_settings(OUTBOX={"BROKER": "broker", "PRODUCER_GROUP": "shop", "TOPICS": {"orders": {}}})
class OfTheClass(_Data, OutboxTestMixin, TestCase):
    expected = ["of setUpTestData", "of setUpClass"]  # noqa: RUF012

    @classmethod
    def setUpTestData(cls) -> None:
        place("of setUpTestData")
        with rolled_back():
            publish("orders", {}, key="undone")

    @classmethod
    def setUpClass(cls) -> None:
        super().setUpClass()
        place("of setUpClass")


@override_settings(OUTBOX={"BROKER": "default", "PRODUCER_GROUP": "shop", "TOPICS": {"orders": {}}})
class OnTheAtomicPath(_Data, OutboxTestMixin, TestCase):
    expected = ["of setUpTestData"]  # noqa: RUF012

    @classmethod
    def setUpTestData(cls) -> None:
        place("of setUpTestData")


class Drained(OutboxTestMixin, TestCase):
    """The class itself runs its subscribers: each test begins after that."""

    @classmethod
    def setUpTestData(cls) -> None:
        _register()
        place("handled")
        assert cls.outbox.drain() == 1

    def test_one(self) -> None:
        assert keys(self.outbox) == ["handled"]
        assert self.outbox.drain() == 0
        place("mine")
        assert self.outbox.drain() == 1
        assert set(Effect.objects.values_list("number", flat=True)) == {"handled", "mine"}

    test_two = test_one


class Committed(OutboxTestMixin, TransactionTestCase):
    @classmethod
    def setUpClass(cls) -> None:
        super().setUpClass()
        place("of setUpClass")

    def setUp(self) -> None:
        place("of setUp")
        super().setUp()

    def test_one(self) -> None:
        assert keys(self.outbox) == ["of setUp", "of setUpClass"]
        place("mine")
        assert keys(self.outbox) == ["mine", "of setUp", "of setUpClass"]
        assert self.outbox.drain() == 3

    test_two = test_one


# -- fixtures of pytest, in any order -----------------------------------------------------------------


@pytest.fixture
def early(db: None) -> None:
    place("early")


@pytest.fixture
def late(outbox: InMemoryOutbox) -> Iterator[None]:
    place("late")
    yield
    # Also what a fixture publishes at its end stays here.
    place("end")


@pytest.mark.parametrize("number", [1, 2])
def test_a_fixture_before_the_outbox(early: None, outbox: InMemoryOutbox, late: None, number: int) -> None:
    assert keys(outbox) == ["early", "late"]
    assert outbox.drain() == 2


def test_a_fixture_after_the_outbox(outbox: InMemoryOutbox, early: None) -> None:
    assert keys(outbox) == ["early"]


class TestOfAProjectsOwnFixture:
    """A project may have a fixture of this name, which has nothing to do with the broker in memory."""

    @pytest.fixture
    def outbox(self) -> str:
        return "of the project"

    def test_it_leaves_the_settings_alone(self, outbox: str) -> None:
        assert (outbox, get_settings().in_memory) == ("of the project", False)


# -- tasks of Celery ------------------------------------------------------------------------------------

app = Celery("any-order", broker="amqp://nobody@127.0.0.1:1//", task_cls=TransactionalTask, set_as_current=False)
app.conf.broker_connection_timeout = 0.2
app.conf.task_publish_retry = False
ran: list[Any] = []


@app.task(name="any_order.double")
def double(number: int) -> int:
    ran.append(number)
    return 2 * number


@app.task(name="any_order.mail")
def mail(body: Any) -> None:
    ran.append(body)


@pytest.mark.usefixtures("db")
def test_tasks_never_reach_the_transport(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    ran.clear()
    with override_settings(
        OUTBOX={
            "BROKER": "broker",
            "PRODUCER_GROUP": "shop",
            "TOPICS": {"orders": {}},
            "CELERY_APP": "tests.django.test_any_order.app",
        }
    ):
        subscriber_task("orders", group="mail")(mail)
        outbox: InMemoryOutbox = request.getfixturevalue("outbox")
        with transaction.atomic():
            double.delay(1)
            chain(double.s(2), double.s()).delay()
            assert outbox.tasks == []
        with rolled_back():
            double.delay(99)
        double.delay(3)
        publish("orders", {"n": 4}, key="4", at_once=True)
        outbox.drain()
        found = sorted((one.name.removeprefix("any_order."), str(one.args)) for one in outbox.tasks)
        assert found == [("double", "[1]"), ("double", "[2]"), ("double", "[3]"), ("mail", "[{'n': 4}]")]
        assert ran == []
        assert outbox.run_tasks() == 5
        assert sorted(map(str, ran)) == ["1", "2", "3", "4", "{'n': 4}"]
        assert outbox.tasks == []
        monkeypatch.setitem(app.conf, "task_always_eager", True)
        publish("orders", {"n": 5}, key="5", at_once=True)
        outbox.drain()
        assert ran[5:] == [{"n": 5}]


def test_a_task_gets_one_message() -> None:
    with pytest.raises(InvalidSubscription, match="remove batch"):
        subscriber_task("orders", group="mail", batch=2)(mail)
