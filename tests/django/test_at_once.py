"""Outside of a transaction a publish call is refused, unless it says at_once=True; one test per place of Django."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
from asgiref.sync import async_to_sync
from django.db import connections, transaction
from django.db.transaction import TransactionManagementError
from django.http import HttpRequest, HttpResponse
from django.test import Client, TestCase, TransactionTestCase, override_settings
from django.urls import path as route

from outbox import Delivery
from outbox.contrib.django import (
    ClaimedDelivery,
    apublish,
    apublish_many,
    apublish_messages,
    fenced_producer,
    message,
    publish,
    publish_many,
    publish_messages,
    subscriber,
)
from outbox.contrib.django.testing import OutboxTestMixin
from outbox.errors import InvalidName, TransactionRequired, TransactionUsageError, UnknownTopic
from outbox.hooks import Option
from tests.django import test_claims, test_inbox
from tests.django.shop.models import Effect, Order
from tests.django.state import decisions

CALLS: dict[str, Callable[..., object]] = {
    "publish": lambda **given: publish("orders", {}, key="k", **given),
    "publish_many": lambda **given: publish_many("orders", [{}], key="k", **given),
    "publish_messages": lambda **given: publish_messages([message("orders", {}, key="k")], **given),
    "apublish": lambda **given: async_to_sync(apublish)("orders", {}, key="k", **given),
    "apublish_many": lambda **given: async_to_sync(apublish_many)("orders", [{}], key="k", **given),
    "apublish_messages": lambda **given: async_to_sync(apublish_messages)([message("orders", {}, key="k")], **given),
}
OUTSIDE = (
    r"^the message for topic 'orders' was not published: no transaction is open, so .* `with transaction\.atomic\("
)
OUTSIDE += r"\):`\. If no write belongs to the message, pass at_once=True\.$"
INSIDE = r"^the message for topic 'orders' was not published: at_once=True was passed, but a transaction is open on "
INSIDE += r"'default', and .*Leave at_once out, "
INSIDE += r".*`transaction\.on_commit\(lambda: publish\(…, at_once=True\), using='default'\)`"


def sent() -> list[str]:
    """The keys of committed messages."""
    return sorted(key for key, state in decisions().items() if state == "C")


def orders() -> list[str]:
    return sorted(Order.objects.values_list("number", flat=True))


def place(number: str, **given: Any) -> None:
    Order.objects.create(number=number)
    publish("orders", {}, key=number, **given)


# -- the six calls ---------------------------------------------------------------------------------


def test_each_call_is_refused_outside_and_sends_with_at_once(empty_log: None) -> None:
    for name, call in CALLS.items():
        with pytest.raises(TransactionRequired, match=OUTSIDE):
            call()
        assert decisions() == {}, name
    for call in CALLS.values():
        call(at_once=True)
    assert decisions() == {"k": "C"}


def test_at_once_inside_a_transaction_is_refused_and_marks_the_block(empty_log: None) -> None:
    for name, call in CALLS.items():
        with transaction.atomic():
            Order.objects.create(number=name)
            with pytest.raises(TransactionUsageError, match=INSIDE) as refused:
                call(at_once=True)
            assert not isinstance(refused.value, TransactionRequired)
    assert (orders(), decisions()) == ([], {})


def test_the_messages_of_a_fenced_producer(path: str) -> None:
    producer = fenced_producer("import", wait_seconds=1)
    with pytest.raises(TransactionRequired, match=OUTSIDE):
        producer.publish_messages([message("orders", {}, key="k")])
    with transaction.atomic(), pytest.raises(TransactionUsageError, match=INSIDE):
        producer.publish_messages([message("orders", {}, key="k")], at_once=True)
    producer.publish_messages([message("orders", {}, key="alone")], at_once=True)
    with transaction.atomic():
        producer.publish_messages([message("orders", {}, key="inside")])
    assert sent() == ["alone", "inside"]


def test_another_alias_is_not_in_the_transaction(empty_log: None) -> None:
    """A transaction on one alias is none for a message that names another one."""
    with transaction.atomic():
        Order.objects.create(number="kept")
        with pytest.raises(TransactionRequired) as refused:
            publish("orders", {}, key="stray", using="other")
        text = str(refused.value)
        assert "no transaction is open on 'other'" in text
        assert "`with transaction.atomic(using='other'):`" in text
        assert "If the message belongs to the open transaction on 'default', name this alias." in text
        publish("orders", {}, key="other", using="other", at_once=True)
        assert sent() == ["other"]
        with transaction.atomic(using="other"):
            publish("orders", {}, key="both", using="default")
            with pytest.raises(TransactionUsageError, match="transactions are open on 'default', 'other'"):
                publish("orders", {}, key="stray", at_once=True)
    assert (orders(), sent()) == (["kept"], ["both", "other"])


@dataclass(frozen=True)
class Kept(Option):
    """An option of a part, which acts in the transaction of the publisher."""

    is_kept: ClassVar[bool] = True


def test_an_option_of_a_transaction_is_refused_with_at_once(empty_log: None) -> None:
    cases: list[tuple[list[Option], dict[str, Any], str]] = [
        ([Kept()], {}, r"Kept\(\) for topic 'orders' needs a transaction"),
        ([], {"immunity_seconds": 9}, "immunity_seconds=9 for topic 'orders' applies to a transaction"),
    ]
    for options, more, said in cases:
        for at_once in (False, True):
            with pytest.raises(TransactionRequired, match=said):
                publish("orders", {}, *options, at_once=at_once, **more)
    assert decisions() == {}


# -- the places of Django --------------------------------------------------------------------------


def view(request: HttpRequest, number: str) -> HttpResponse:
    place(number)
    return HttpResponse(status=201)


urlpatterns = [route("view/<number>", view)]


@override_settings(ROOT_URLCONF=__name__)
def test_a_view_with_and_without_atomic_requests(empty_log: None) -> None:
    with pytest.raises(TransactionRequired, match=OUTSIDE):
        Client().post("/view/off")
    connections["default"].settings_dict["ATOMIC_REQUESTS"] = True
    try:
        assert Client().post("/view/on").status_code == 201
    finally:
        connections["default"].settings_dict["ATOMIC_REQUESTS"] = False
    # Without a transaction the row was committed before publish was called.
    assert (orders(), sent()) == (["off", "on"], ["on"])


def test_on_commit_callbacks_run_after_the_transaction(path: str) -> None:
    @transaction.atomic
    def publish_later() -> None:
        Order.objects.create(number="1")
        transaction.on_commit(lambda: publish("orders", {}, key="refused"))

    with pytest.raises(TransactionRequired, match=OUTSIDE):
        publish_later()
    with transaction.atomic():
        transaction.on_commit(lambda: publish("orders", {}, key="sent", at_once=True))
        transaction.on_commit(transaction.atomic(lambda: place("2")))
    assert (orders(), sent()) == (["1", "2"], ["2", "sent"])


# -- handlers --------------------------------------------------------------------------------------


@pytest.mark.usefixtures("path", "no_subscribers")
def test_a_handler_without_an_inbox_has_no_transaction() -> None:
    @subscriber("orders", group="effects", idempotent=False)
    def effect(given: Delivery) -> None:
        block = transaction.atomic() if given.key == "block" else contextlib.nullcontext()
        with block:
            publish("payments", {}, key=given.key, at_once=given.key == "at once")

    found = {key: test_inbox.run([test_inbox.delivery(key)])[0] for key in ("plain", "block", "at once")}
    assert isinstance(found["plain"], TransactionRequired) and "pass at_once=True" in str(found["plain"])
    assert (found["block"], found["at once"]) == (test_inbox.HANDLED, test_inbox.HANDLED)
    assert sent() == ["at once", "block"]


@pytest.mark.usefixtures("path", "no_subscribers", "no_claims")
def test_a_handler_with_outside_effects_publishes_in_finish_or_in_a_step() -> None:
    @subscriber("orders", group="slow", effects="outside")
    def slow(given: ClaimedDelivery) -> None:
        if given.key == "outside":
            publish("payments", {}, key="stray", at_once=True)
        if given.key == "step":
            given.step("tell", lambda: str(publish("payments", {}, key="stray").message_id))
        if given.key == "good":
            given.step("tell", lambda: str(publish("payments", {}, key="step", at_once=True).message_id))
        with given.finish():
            Effect.objects.create(number=given.key)
            publish("payments", {}, key=f"finish of {given.key}")

    found = {key: test_claims.run(test_claims.delivery(key)) for key in ("outside", "step", "good")}
    assert isinstance(found["outside"], TransactionUsageError)
    assert isinstance(found["step"], TransactionRequired)
    assert found["good"] == test_claims.HANDLED
    assert sent() == ["finish of good", "step"]


# -- tests of an application -----------------------------------------------------------------------


@pytest.fixture(autouse=True)
def _databases(django_db_setup: None) -> None:
    """The test cases below need the databases, too."""


class InTheTransactionOfATestCase(OutboxTestMixin, TestCase):
    """The transaction around a test is none of the application's, so a test finds what production would refuse."""

    def test_it_is_refused_as_in_production(self) -> None:
        with pytest.raises(TransactionRequired, match=OUTSIDE):
            place("1")
        with pytest.raises(TransactionUsageError, match=INSIDE), transaction.atomic():
            place("2", at_once=True)
        with transaction.atomic():
            place("3")
        publish("orders", {}, key="4", at_once=True)
        with pytest.raises(TransactionRequired), self.captureOnCommitCallbacks(execute=True), transaction.atomic():
            transaction.on_commit(lambda: publish("orders", {}, key="5"))
        with self.captureOnCommitCallbacks(execute=True), transaction.atomic():
            transaction.on_commit(lambda: publish("orders", {}, key="6", at_once=True))
        assert sorted(item.key for item in self.outbox.messages("orders")) == ["3", "4", "6"]


class WithoutATransaction(OutboxTestMixin, TransactionTestCase):
    def test_it_is_refused_as_in_production(self) -> None:
        with pytest.raises(TransactionRequired, match=OUTSIDE):
            publish("orders", {})
        publish("orders", {}, key="sent", at_once=True)
        with transaction.atomic():
            place("kept")
        assert [item.key for item in self.outbox.messages("orders")] == ["sent", "kept"]


# -- no key, and the cause of a rollback -----------------------------------------------------------


@pytest.mark.usefixtures("empty_log")
def test_key_none_of_publish_many_is_no_key() -> None:
    with transaction.atomic():
        publish_many("orders", [{}, {}], key=None)
        with pytest.raises(InvalidName, match=r"'orders': key None is not allowed"), transaction.atomic():
            publish_many("orders", [{}], key=lambda body: None)
    assert decisions() == {"": "C"}


def test_the_next_error_of_a_block_names_the_refused_publish(empty_log: None) -> None:
    with transaction.atomic():
        with contextlib.suppress(UnknownTopic):
            publish("nowhere", {}, key="first")
        with contextlib.suppress(TransactionUsageError):
            publish("orders", {}, at_once=True)
        with pytest.raises(TransactionManagementError) as query:
            Order.objects.count()
        assert isinstance(query.value.__cause__, UnknownTopic)
        with pytest.raises(TransactionUsageError, match=r"an earlier error: UnknownTopic: .*nowhere") as again:
            publish("orders", {}, key="second")
        assert isinstance(again.value.__cause__, UnknownTopic)
    # It is not the cause of what happens in a later block.
    with transaction.atomic():
        transaction.set_rollback(True)
        with pytest.raises(TransactionUsageError, match="marked for rollback, for example") as later:
            publish("orders", {})
        assert later.value.__cause__ is None
    assert sent() == []


@pytest.mark.usefixtures("path", "no_subscribers")
def test_a_handler_that_catches_the_error_of_publish_fails_with_it() -> None:
    @subscriber("orders", group="effects")
    def effect(given: Delivery) -> None:
        with contextlib.suppress(UnknownTopic):
            publish("nowhere", {})

    [found] = test_inbox.run([test_inbox.delivery("one")])
    assert isinstance(found, TransactionUsageError)
    assert isinstance(found.__cause__, UnknownTopic)
    assert "UnknownTopic" in str(found) and "nowhere" in str(found)
