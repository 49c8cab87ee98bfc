"""Several messages that become visible together or never: `message_transaction()` on both paths, and its fences."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from uuid import UUID

import pytest
from django.db import connections, transaction

from outbox.contrib.django import (
    fenced_producer,
    get_broker,
    message,
    message_transaction,
    publish_messages,
    run_check_back,
)
from outbox.contrib.django.models import LedgerEntry
from outbox.contrib.django.publishing.message_transactions import FencedProducer
from outbox.errors import (
    InvalidMessage,
    LeftoversUndecided,
    ProducerFenced,
    TransactionTimedOut,
    TransactionUsageError,
    UnserialisableBody,
)
from tests.django.shop.models import Order
from tests.django.state import decisions, rolled_back, stored

pytestmark = pytest.mark.usefixtures("empty_log")


def publish_three(names: Sequence[str] = ("a", "b", "c")) -> set[UUID]:
    """The transaction ids of the three, of which there should be one."""
    with message_transaction() as tx:
        for topic, key in zip(("orders", "steps", "orders"), names, strict=True):
            tx.publish(topic, {"key": key}, key=key)
    return {receipt.transaction_id for receipt in tx.receipts}


def test_all_or_none_over_several_topics(path: str) -> None:
    with transaction.atomic():
        assert len(publish_three()) == 1
        Order.objects.create(number="kept")
    with rolled_back():
        publish_three(("d", "e", "f"))
    run_check_back()
    assert {key: decision for key, decision in decisions().items() if decision == "C"} == dict.fromkeys("abc", "C")


def test_one_ledger_row_however_many_messages(path: str) -> None:
    before = LedgerEntry.objects.count()
    with transaction.atomic():
        publish_three()
    assert LedgerEntry.objects.count() - before == (1 if path == "two_phase" else 0)


def test_outside_a_transaction_all_are_sent_when_the_block_is_left(path: str) -> None:
    with message_transaction(at_once=True) as tx:
        tx.publish("orders", 1, key="a")
        assert stored() == []
        tx.publish("payments", 2, key="b")
    assert decisions() == {"a": "C", "b": "C"}
    assert [receipt.topic for receipt in tx.receipts] == ["orders", "payments"]


def publish_and_fail() -> None:
    with message_transaction(at_once=True) as tx:
        tx.publish("orders", 1, key="a")
        raise ZeroDivisionError


def test_an_exception_that_leaves_the_block_drops_its_messages(path: str) -> None:
    with pytest.raises(ZeroDivisionError):
        publish_and_fail()
    assert stored() == []


def publish_and_swallow(at_once: bool = False) -> None:
    with message_transaction(at_once=at_once) as tx:
        tx.publish("orders", 1, key="a")
        with contextlib.suppress(UnserialisableBody):
            tx.publish("orders", object(), key="b")


def test_a_message_that_cannot_be_sent_takes_the_others_along_even_when_its_error_is_swallowed(path: str) -> None:
    with pytest.raises(TransactionUsageError, match="could not be added"):
        publish_and_swallow(at_once=True)
    assert stored() == []


def test_swallowed_inside_atomic_it_rolls_the_business_write_back(path: str) -> None:
    with transaction.atomic():
        Order.objects.create(number="dropped")
        with contextlib.suppress(TransactionUsageError):
            publish_and_swallow()
    assert not Order.objects.filter(number="dropped").exists()
    assert stored() == []


def test_publishing_in_a_deeper_atomic_is_refused(path: str) -> None:
    with pytest.raises(TransactionUsageError, match="an inner atomic"), transaction.atomic():
        with message_transaction() as tx, transaction.atomic():
            tx.publish("orders", 1, key="a")
    assert stored() == []


def test_publishing_in_an_atomic_that_was_opened_inside_is_refused(path: str) -> None:
    with pytest.raises(TransactionUsageError, match="an inner atomic"):
        with message_transaction(at_once=True) as tx, transaction.atomic():
            tx.publish("orders", 1, key="a")
    assert stored() == []


def test_a_savepoint_around_the_whole_takes_its_messages_with_it(path: str) -> None:
    with transaction.atomic():
        with rolled_back():
            publish_three()
        publish_three(("d", "e", "f"))
    assert {key for key, decision in decisions().items() if decision == "C"} == set("def")


def test_it_is_over_when_it_is_left_and_entered_once(path: str) -> None:
    tx = message_transaction(at_once=True)
    with pytest.raises(TransactionUsageError, match="not before or after"):
        tx.publish("orders", 1)
    with pytest.raises(TransactionUsageError), tx:
        pass
    with pytest.raises(TransactionUsageError, match="used before"), tx:
        pass


def test_many_transactions_over_the_same_keys_in_any_order_do_not_deadlock(path: str) -> None:
    keys = [f"k{number}" for number in range(8)]

    def publish_all(turn: int) -> None:
        try:
            for _ in range(10):
                with transaction.atomic(), message_transaction() as tx:
                    for key in keys[turn:] + keys[:turn]:
                        tx.publish("steps", turn, key=key)
        finally:
            connections.close_all()

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(publish_all, (0, 2, 4, 6)))
    assert len(stored()) == 4 * 10 * len(keys)


def test_more_keys_than_a_transaction_may_lock_are_refused_by_number(path: str) -> None:
    many = [message("steps", None, key=number) for number in range(1_001)]
    with pytest.raises(InvalidMessage, match="1001 different keys"), transaction.atomic():
        publish_messages(many)
    with transaction.atomic():
        publish_messages(many[:1_000])
    assert len(stored()) == 1_000


def test_a_transaction_without_a_database_is_dropped_after_its_timeout(path: str) -> None:
    with pytest.raises(TransactionTimedOut, match="orders"), message_transaction(at_once=True, timeout_seconds=0) as tx:
        tx.publish("orders", 1, key="late")
    assert stored() == []


class TestFencing:
    """A producer with a transactional id: the newest instance is the only one that sends."""

    def test_the_older_instance_is_refused_when_it_commits_messages_of_its_own(self, path: str) -> None:
        older, newer = fenced_producer("import"), fenced_producer("import")
        refused = pytest.raises(ProducerFenced, match="epoch 1, but an instance with epoch 2")
        with refused, older.transaction(at_once=True) as tx:
            tx.publish("orders", 1, key="older")
        with newer.transaction(at_once=True) as tx:
            tx.publish("orders", 1, key="newer")
        assert decisions() == {"newer": "C"}

    def test_the_older_instance_is_refused_inside_a_local_transaction(self, path: str) -> None:
        older = fenced_producer("import")
        fenced_producer("import")
        with transaction.atomic():
            Order.objects.create(number="dropped")
            with pytest.raises(ProducerFenced):
                send(older, "older", at_once=False)
        assert not Order.objects.filter(number="dropped").exists()
        assert stored() == []

    def test_ids_and_instances_of_others_are_not_touched(self, path: str) -> None:
        one, other = fenced_producer("one"), fenced_producer("other")
        for producer in (one, other, one):
            send(producer, "k")
        assert len(stored()) == 3

    def test_a_newer_instance_settles_what_an_older_one_left_undecided(self, path: str) -> None:
        older = fenced_producer("import")
        with rolled_back(), older.transaction() as tx:
            tx.publish("orders", 1, key="left")
        newer = fenced_producer("import")
        assert get_broker().leftovers(newer.instance) == []
        assert {row.decision for row in stored()} <= {"R"}

    def test_a_newer_instance_waits_for_an_older_one_that_is_inside_its_transaction(self, path: str) -> None:
        older = fenced_producer("import")
        with transaction.atomic():
            send(older, "slow", at_once=False)
            with pytest.raises(LeftoversUndecided):
                in_thread(lambda: fenced_producer("import", wait_seconds=0.3))
        newer = fenced_producer("import")
        assert decisions() == {"slow": "C"}
        send(newer, "next")
        with pytest.raises(ProducerFenced):
            send(older, "zombie")


def send(producer: FencedProducer, key: str, *, at_once: bool = True) -> None:
    with producer.transaction(at_once=at_once) as tx:
        tx.publish("orders", None, key=key)


def in_thread(work: Callable[[], object]) -> None:
    failure: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:
            failure.append(error)
        finally:
            connections.close_all()

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if failure:
        raise failure[0]
