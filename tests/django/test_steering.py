"""Requests besides publishing, on both paths: recall, the switch, immunity, checks."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any
from uuid import UUID, uuid4

import pytest
from django.core.management.base import CommandError
from django.db import connections, transaction

from outbox import Recall, RecallStatus
from outbox.contrib.django import (
    message,
    publish,
    publish_many,
    publish_messages,
    recall,
    recall_key,
    transactional_message,
)
from outbox.contrib.django.settings.conf import get_settings
from outbox.errors import (
    MessageTypeMismatch,
    TransactionalMessagesRejected,
    TransactionUsageError,
    UnknownTopic,
    UsageError,
)
from tests.django.sessions import broker_connection
from tests.django.shop.models import Order
from tests.django.state import decisions, stored
from tests.django.support import call, sequence

pytestmark = pytest.mark.usefixtures("empty_log")

HOUR = 3600


def scheduled() -> list[str]:
    """The keys of what waits for its time, once everything decided has been sequenced."""
    sequence()
    with broker_connection() as (connection, _):
        rows = connection.execute(
            "SELECT key FROM outbox.scheduled JOIN outbox.commit_log USING (log_id) ORDER BY log_id"
        ).fetchall()
    return [row[0] for row in rows]


def remind(*keys: str) -> list[UUID]:
    """Delayed messages, published in transactions."""
    found = []
    for key in keys:
        with transaction.atomic():
            found.append(publish("reminders", {}, key=key, delay=HOUR).message_id)
    assert scheduled() == list(keys)
    return found


# -- only in a transaction --------------------------------------------------------------------------


def test_a_topic_that_is_only_transactional_refuses_a_publish_outside() -> None:
    with pytest.raises(MessageTypeMismatch, match=r"transaction\.atomic"):
        publish("bound", {}, key="alone", at_once=True)
    with transaction.atomic():
        publish("bound", {}, key="kept")
    assert decisions() == {"kept": "C"}


# -- immunity of one message ------------------------------------------------------------------------


def immunities() -> dict[str, int | None]:
    stored()
    with broker_connection() as (connection, _):
        rows = connection.execute("SELECT key, immunity_seconds FROM outbox.commit_log").fetchall()
    return dict(rows)


def test_immunity_is_given_per_message(path: str) -> None:
    @transactional_message("orders", key="decorated", body={}, immunity_seconds=7200)
    def decorated() -> None:
        publish("orders", {}, key="single", immunity_seconds=HOUR)
        publish_many("orders", [{}], key="many", immunity_seconds=60)
        publish_messages([message("orders", {}, key="ready")], immunity_seconds=0)
        publish("orders", {}, key="default")

    decorated()
    expected = {"decorated": 7200, "single": HOUR, "many": 60, "ready": 0, "default": get_settings().immunity_seconds}
    # No check asks about a message of the atomic path.
    assert immunities() == (expected if path == "two_phase" else dict.fromkeys(expected))


def test_an_immunity_that_is_none_is_refused() -> None:
    cases: list[Any] = [-1, 1.5, True, "60", 10**9]
    for seconds in cases:
        with pytest.raises(UsageError, match="immunity_seconds must be a whole number"):
            transactional_message("orders", body={}, immunity_seconds=seconds)
        with transaction.atomic():
            Order.objects.create(number="1")
            with pytest.raises(UsageError, match="'orders': immunity_seconds must be a whole number"):
                publish("orders", {}, immunity_seconds=seconds)
        assert not Order.objects.exists()


# -- recall -----------------------------------------------------------------------------------------


def test_recall_by_id_and_by_key(path: str) -> None:
    first, _, _ = remind("7", "7", "8")
    assert recall(first).status is RecallStatus.RECALLED
    assert recall(first).status is RecallStatus.REPEATED
    assert scheduled() == ["7", "8"]
    assert [one.key for one in recall_key("reminders", 7)] == ["7"]
    assert recall_key("reminders", 7) == []
    assert scheduled() == ["8"]
    assert recall(uuid4()).status is RecallStatus.UNKNOWN
    assert recall(publish("orders", {}, at_once=True).message_id).status is RecallStatus.WAITING
    with pytest.raises(UnknownTopic, match="Did you mean 'reminders'"):
        recall_key("reminder", 7)


def test_recall_is_refused_where_it_could_not_be_undone() -> None:
    [reminder] = remind("7")
    with pytest.raises(TransactionUsageError, match="on_commit"), transaction.atomic():
        recall(reminder)
    with pytest.raises(TransactionUsageError, match="on_commit"), transaction.atomic():
        recall_key("reminders", "7")
    assert scheduled() == ["7"]
    outcomes: list[Recall] = []
    with transaction.atomic():
        transaction.on_commit(lambda: outcomes.append(recall(reminder)))
    assert [one.is_recalled for one in outcomes] == [True]


def test_recall_is_refused_for_what_is_open_and_for_nothing_else() -> None:
    [reminder] = remind("7")
    with (
        pytest.raises(TransactionUsageError, match=r"^recall\(…\) takes effect at once"),
        transaction.atomic(),
        transaction.atomic(using="other"),
    ):
        recall(reminder)
    transaction.set_autocommit(False, using="other")
    try:
        with connections["other"].cursor() as cursor:
            cursor.execute("SELECT 1")
        with pytest.raises(TransactionUsageError, match=r"open on 'other' .* Commit it before the call"):
            recall_key("reminders", "7")
        transaction.commit(using="other")
        assert recall(reminder).is_recalled
    finally:
        transaction.rollback(using="other")
        transaction.set_autocommit(True, using="other")


def test_the_recall_command() -> None:
    first, second, third, fourth = map(str, remind("7", "7", "8", "9"))
    assert "Recall 2 messages" in call("outbox_message", "recall", first, second, "--dry-run")
    assert "Recall 2 messages" in call(*("outbox_message", "recall", "--topic", "reminders", "--key", "7", "--dry-run"))
    assert f"after: {first}: recalled" in call("outbox_message", "recall", first)
    done = json.loads(call("outbox_message", "recall", "--topic", "reminders", "--key", "7", "--json"))
    assert done["after"] == {second: "recalled", "messages": 1}
    assert scheduled() == ["8", "9"]
    unknown = str(uuid4())
    with pytest.raises(CommandError, match=rf"not done: {unknown} \(unknown\)"):
        call("outbox_message", "recall", unknown, third)
    assert scheduled() == ["9"], "the others are"
    delivered = publish("reminders", {}, key="9", at_once=True).message_id
    assert scheduled() == ["9"]
    with pytest.raises(CommandError, match=rf"{delivered} \(delivered\)\. `outbox_message show"):
        call("outbox_message", "recall", str(delivered))
    with pytest.raises(CommandError, match="'8' waits"):
        call("outbox_message", "recall", "--topic", "reminders", "--key", "8")
    assert "Done." in call("outbox_message", "recall", fourth)


def test_bad_input_of_the_recall_command_is_explained() -> None:
    cases: list[tuple[list[str], str]] = [
        ([], "name message ids"),
        (["--topic", "reminders"], "name message ids"),
        (["--key", "7"], "name message ids"),
        ([str(uuid4()), "--topic", "reminders", "--key", "7"], "name message ids"),
        (["seven"], "is not a message or transaction id"),
        (["--topic", "reminder", "--key", "7"], "Did you mean 'reminders'"),
    ]
    for arguments, complaint in cases:
        with pytest.raises(CommandError, match=complaint):
            call("outbox_message", "recall", *arguments)


# -- the switch -------------------------------------------------------------------------------------


@pytest.fixture
def switched_back(path: str) -> Iterator[None]:
    yield
    call("outbox_transaction", "accept")


@pytest.mark.usefixtures("switched_back")
def test_transactional_messages_are_refused_and_the_transaction_rolls_back(path: str) -> None:
    call("outbox_transaction", "reject")

    @transaction.atomic
    def order() -> None:
        Order.objects.create(number="1")
        publish("orders", {}, key="refused")

    for _ in range(2):
        with pytest.raises(TransactionalMessagesRejected, match="outbox_transaction accept"):
            order()
    assert not Order.objects.exists()
    publish("orders", {}, key="plain", at_once=True)
    call("outbox_transaction", "accept")
    with transaction.atomic():
        publish("orders", {}, key="kept")
    assert decisions() == {"plain": "C", "kept": "C"}
