"""The lock of FIFO keys, half messages that time out, and the flush at the end of a process."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psycopg
import pytest
from django.core.management import call_command
from django.core.management.base import CommandError
from django.db import connections, transaction

from outbox import Decision
from outbox.broker.transaction.checks import find_undecided
from outbox.contrib.django import get_broker, publish, run_check_back
from outbox.contrib.django.database.aliases import alias_conninfo, broker_connection, on_broker
from outbox.contrib.django.engine.broker import flush
from outbox.contrib.django.ledger.ledger_checker import LedgerChecker
from outbox.contrib.django.settings.conf import get_settings
from outbox.errors import BrokerUnavailable, SchemaError
from outbox.utils import faults
from outbox.utils.ids import uuid7
from tests.django.configured import OUTBOX
from tests.django.processes import ROOT, environment
from tests.django.shop.models import Order
from tests.django.state import decisions, rolled_back, stored
from tests.django.test_barrier import check
from tests.support import eventually

pytestmark = pytest.mark.usefixtures("empty_log")


@pytest.fixture
def pool(django_db_blocker: Any) -> Iterator[ThreadPoolExecutor]:
    """Threads with connections of their own."""
    with ThreadPoolExecutor(4) as made:
        yield made


class Publisher:
    """Publishes in a thread of its own; it commits when the test allows it."""

    def __init__(self, pool: ThreadPoolExecutor, key: str, *, alias: str = "default", topic: str = "steps") -> None:
        self.published = threading.Event()
        self._go = threading.Event()
        self._future = pool.submit(self._run, key, alias, topic)

    def _run(self, key: str, alias: str, topic: str) -> None:
        try:
            with transaction.atomic(using=alias):
                publish(topic, {}, key=key, using=alias)
                self.published.set()
                assert self._go.wait(20)
        finally:
            connections.close_all()

    def commit(self) -> None:
        self._go.set()
        self._future.result(20)


def test_the_same_key_waits_for_the_earlier_commit_and_other_keys_do_not(path: str, pool: ThreadPoolExecutor) -> None:
    first = Publisher(pool, "a")
    assert first.published.wait(10)
    second, other = Publisher(pool, "a"), Publisher(pool, "b")
    assert other.published.wait(10)
    assert not second.published.wait(0.3)
    first.commit()
    assert second.published.wait(10)
    second.commit()
    other.commit()
    assert [item.key for item in stored()].count("a") == 2


def test_on_other_databases_a_row_is_the_lock(pool: ThreadPoolExecutor) -> None:
    first = Publisher(pool, "a", alias="lite")
    assert first.published.wait(10)
    second = Publisher(pool, "a", alias="lite")
    assert not second.published.wait(0.3)
    first.commit()
    assert second.published.wait(20)
    second.commit()
    assert decisions() == {"a": "C"}


def test_without_the_lock_no_publisher_waits(
    path: str, pool: ThreadPoolExecutor, outbox_settings: Callable[..., None]
) -> None:
    topics = {**OUTBOX["TOPICS"], "steps": {"types": ["FIFO", "TRANSACTION"], "queue_count": 4, "key_lock": False}}
    outbox_settings(TOPICS=topics)
    with broker_connection() as (connection, _):
        connection.execute("UPDATE outbox.topic SET key_lock = false WHERE name = 'steps'")
    try:
        first, second = Publisher(pool, "a"), Publisher(pool, "a")
        assert first.published.wait(10)
        assert second.published.wait(10)
        second.commit()
        first.commit()
    finally:
        with broker_connection() as (connection, _):
            connection.execute("UPDATE outbox.topic SET key_lock = true WHERE name = 'steps'")


def test_a_topic_that_only_the_broker_knows_is_locked_as_well(
    pool: ThreadPoolExecutor, outbox_settings: Callable[..., None]
) -> None:
    outbox_settings(TOPICS={})
    first = Publisher(pool, "a")
    assert first.published.wait(10)
    second = Publisher(pool, "a")
    assert not second.published.wait(0.3)
    first.commit()
    second.commit()


def test_a_half_that_times_out_rolls_back_and_is_settled_if_it_was_stored_all_the_same(
    outbox_settings: Callable[..., None],
) -> None:
    outbox_settings(SEND_TIMEOUT_SECONDS=0.5)
    # The statement is prepared on the pooled connection, so that the next one is sent as a whole.
    place("warm-up")
    flush(within_seconds=5)
    with psycopg.connect(alias_conninfo("broker")) as blocker:
        blocker.execute("LOCK TABLE outbox.commit_log IN ACCESS EXCLUSIVE MODE")
        with pytest.raises(BrokerUnavailable, match="orders"):
            place("late")
        assert Order.objects.count() == 1
    # The lock is gone: the abandoned INSERT continues inside the server and stores the half.
    eventually(lambda: "late" in decisions(), within_seconds=10)
    eventually(lambda: run_check_back() and decisions()["late"] == "R", within_seconds=20)


@transaction.atomic
def place(number: str) -> None:
    Order.objects.create(number=number)
    publish("orders", {}, key=number)


def test_a_database_without_the_schema_of_the_broker_is_an_error(outbox_settings: Callable[..., None]) -> None:
    outbox_settings(BROKER="default", SCHEMA="nowhere")
    with pytest.raises(SchemaError, match="nowhere"), transaction.atomic():
        publish("orders", {}, key="lost")


def test_a_process_that_ends_flushes_first(django_db_setup: None) -> None:
    program = (
        "import django; django.setup()\n"
        "from tests.django.driver import place_plainly\n"
        "place_plainly('at-exit', False)\n"
    )
    subprocess.run([sys.executable, "-c", program], env=environment(), cwd=ROOT, check=True, timeout=60)
    assert [(item.key, item.decision, item.decided_by) for item in stored()] == [("at-exit", "C", "P")]


# -- the processes that answer ----------------------------------------------------------------------------------------


def test_a_replica_does_not_answer() -> None:
    item = check(uuid7())
    before = connections.settings["other"]["OPTIONS"], connections.settings["other"]["NAME"]
    connections.settings["other"]["OPTIONS"] = {
        **connections.settings["default"]["OPTIONS"],
        "options": "-c default_transaction_read_only=on",
    }
    connections.settings["other"]["NAME"] = connections.settings["default"]["NAME"]
    try:
        only_replica = next(iter(LedgerChecker(["other"]).check_local_transactions([item])))
        both = next(iter(LedgerChecker(["other", "default"]).check_local_transactions([item])))
    finally:
        connections.settings["other"]["OPTIONS"], connections.settings["other"]["NAME"] = before
    assert (only_replica.decision, only_replica.counts, only_replica.alarm) == (Decision.UNKNOWN, False, False)
    assert "read-only" in only_replica.detail
    assert both.decision is Decision.ROLLBACK


def test_an_operators_decision_has_to_agree_with_the_ledger() -> None:
    with rolled_back():
        dropped = publish("orders", {}, key="dropped")
    faults.arm("producer.before_end=raise")
    try:
        with transaction.atomic():
            kept = publish("orders", {}, key="kept")
        flush(within_seconds=5)
    finally:
        faults.arm("")
    with pytest.raises(CommandError, match=r"COMMIT.*--force"):
        call_command("outbox_transaction", "decide", str(dropped.transaction_id), "commit")
    with pytest.raises(CommandError, match=r"ROLLBACK.*COMMIT.*--force"):
        call_command("outbox_transaction", "decide", str(kept.transaction_id), "rollback")
    assert decisions() == {"dropped": None, "kept": None}
    call_command("outbox_transaction", "decide", str(kept.transaction_id), "commit", verbosity=0)
    call_command("outbox_transaction", "decide", str(dropped.transaction_id), "rollback", verbosity=0)
    assert decisions() == {"dropped": "R", "kept": "C"}
    assert {item.decided_by for item in stored()} == {"O"}
    with pytest.raises(CommandError, match="not an undecided transaction"):
        call_command("outbox_transaction", "decide", str(kept.transaction_id), "rollback", "--force", "--no-input")


def test_force_goes_past_the_ledger() -> None:
    with transaction.atomic():
        receipt = publish("orders", {}, key="running")
        found = on_broker(find_undecided, receipt.transaction_id)
        assert found is not None
        assert (found.message.key, found.producer_group) == ("running", get_settings().producer_group)
        with pytest.raises(CommandError, match="still running"):
            call_command("outbox_transaction", "decide", str(receipt.transaction_id), "rollback")
        decide = ("outbox_transaction", "decide", str(receipt.transaction_id), "rollback", "--force", "--no-input")
        with pytest.raises(CommandError, match="may still run"):
            call_command(*decide)
        call_command(*decide, "--running", verbosity=0)
    assert get_broker() is not None
    assert decisions() == {"running": "R"}
