"""Several messages that become visible together or never, on both paths; and producers with a transactional id."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from uuid import UUID

import pytest
from django.db import connections, transaction

from outbox.contrib.django import fenced_producer, get_broker, message, publish_messages, run_check_back
from outbox.contrib.django.publishing.fenced_producers import FencedProducer
from outbox.errors import InvalidMessage, LeftoversUndecided, ProducerFenced, UsageError
from tests.django.shop.models import Order
from tests.django.state import decisions, rolled_back, stored
from tests.django.threads import in_thread as in_thread

pytestmark = pytest.mark.usefixtures("empty_log")


def publish_three(names: Sequence[str] = ("a", "b", "c")) -> set[UUID]:
    """The transaction ids of the three, of which there should be one."""
    three = zip(("orders", "steps", "orders"), names, strict=True)
    receipts = publish_messages([message(topic, {"key": key}, key=key) for topic, key in three])
    return {receipt.transaction_id for receipt in receipts}


def test_all_or_none_over_several_topics(path: str) -> None:
    with transaction.atomic():
        assert len(publish_three()) == 1
        Order.objects.create(number="kept")
    with rolled_back():
        publish_three(("d", "e", "f"))
    run_check_back()
    assert {key: decision for key, decision in decisions().items() if decision == "C"} == dict.fromkeys("abc", "C")


def test_many_transactions_over_the_same_keys_in_any_order_do_not_deadlock(path: str) -> None:
    keys = [f"k{number}" for number in range(8)]

    def publish_all(turn: int) -> None:
        try:
            for _ in range(10):
                with transaction.atomic():
                    publish_messages([message("steps", turn, key=key) for key in keys[turn:] + keys[:turn]])
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


class TestFencing:
    """A producer with a transactional id: the newest instance is the only one that sends."""

    def test_the_older_instance_is_refused_when_it_commits_messages_of_its_own(self, path: str) -> None:
        older, newer = fenced_producer("import"), fenced_producer("import")
        with pytest.raises(ProducerFenced, match="epoch 1, but an instance with epoch 2"):
            send(older, "older")
        send(newer, "newer")
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

    def test_a_newer_instance_settles_what_an_older_one_left_undecided(self, path: str) -> None:
        older = fenced_producer("import")
        with rolled_back():
            send(older, "left", at_once=False)
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

    def test_a_wait_that_no_server_can_keep_is_refused(self) -> None:
        with pytest.raises(UsageError, match="wait_seconds=inf"):
            fenced_producer("import", wait_seconds=float("inf"))


def send(producer: FencedProducer, key: str, *, at_once: bool = True) -> None:
    producer.publish_messages([message("orders", None, key=key)], at_once=at_once)
