"""The lock of FIFO keys, half messages that time out, and the flush at the end of a process."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from enum import Enum
from typing import Any

import psycopg
import pytest
from django.core.management import call_command
from django.core.management.base import CommandError
from django.db import connections, transaction

from outbox import Decision
from outbox.contrib.django import publish, run_check_back
from outbox.contrib.django.database.aliases import alias_conninfo
from outbox.contrib.django.engine.broker import flush
from outbox.contrib.django.ledger.ledger_checker import LedgerChecker
from outbox.errors import BrokerUnavailable, SchemaError
from outbox.utils.ids import uuid7
from tests.django.configured import OUTBOX
from tests.django.processes import ROOT, environment
from tests.django.sessions import broker_connection
from tests.django.shop.models import Order
from tests.django.state import decisions, rolled_back, stored
from tests.django.support import end_messages_lost, sequence
from tests.django.test_barrier import check
from tests.django.threads import Other
from tests.support import eventually

pytestmark = pytest.mark.usefixtures("empty_log")


class Name(str, Enum):  # noqa: UP042 (an f-string shows the text of a StrEnum)
    A = "a"


@pytest.fixture
def pool(django_db_blocker: Any) -> Iterator[ThreadPoolExecutor]:
    """Threads with connections of their own."""
    with ThreadPoolExecutor(4) as made:
        yield made


def publisher(pool: ThreadPoolExecutor, key: str, *, alias: str = "default") -> Other:
    """Publishes in a thread of its own; it commits when the test allows it."""
    return Other(pool, lambda: publish("steps", {}, key=key, using=alias), using=alias)


def test_the_same_key_waits_for_the_earlier_commit_and_other_keys_do_not(path: str, pool: ThreadPoolExecutor) -> None:
    first = publisher(pool, "a")
    assert first.done.wait(10)
    second, other = publisher(pool, Name.A), publisher(pool, "b")
    assert other.done.wait(10)
    assert not second.done.wait(0.3)
    first.end()
    assert second.done.wait(10)
    second.end()
    other.end()
    assert [item.key for item in stored()].count("a") == 2


def test_on_other_databases_a_row_is_the_lock(pool: ThreadPoolExecutor) -> None:
    first = publisher(pool, "a", alias="lite")
    assert first.done.wait(10)
    second = publisher(pool, "a", alias="lite")
    assert not second.done.wait(0.3)
    first.end()
    assert second.done.wait(20)
    second.end()
    assert decisions() == {"a": "C"}


def test_without_the_lock_no_publisher_waits(
    path: str, pool: ThreadPoolExecutor, outbox_settings: Callable[..., None]
) -> None:
    with key_lock_off(outbox_settings):
        first, second = publisher(pool, "a"), publisher(pool, "a")
        assert first.done.wait(10)
        assert second.done.wait(10)
        second.end()
        first.end()


def test_a_topic_that_only_the_broker_knows_is_locked_as_well(
    pool: ThreadPoolExecutor, outbox_settings: Callable[..., None]
) -> None:
    outbox_settings(TOPICS={})
    first = publisher(pool, "a")
    assert first.done.wait(10)
    second = publisher(pool, "a")
    assert not second.done.wait(0.3)
    first.end()
    second.end()


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
    with end_messages_lost(), transaction.atomic():
        kept = publish("orders", {}, key="kept")
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


# -- the order of a key, and its control ------------------------------------------------------------


class Race:
    """Two transactions on one key: `first` draws its log position first; the test chooses which commits first."""

    def __init__(self, pool: ThreadPoolExecutor) -> None:
        self._pool = pool
        self.publishers: dict[str, Other] = {}
        self.committed: list[str] = []

    def start(self, name: str) -> threading.Event:
        """The event that it has published."""
        self.publishers[name] = Other(self._pool, lambda: publish("steps", {"by": name}, key="a", tag=name))
        return self.publishers[name].done

    def commit(self, name: str) -> None:
        self.publishers[name].end()
        self.committed.append(name)


@pytest.fixture
def race(pool: ThreadPoolExecutor) -> Race:
    return Race(pool)


def queued() -> list[str]:
    """The publishers, in the order that consumers will see."""
    sequence()
    with broker_connection() as (connection, _):
        rows = connection.execute(
            "SELECT tag FROM outbox.consume_queue JOIN outbox.commit_log USING (log_id) WHERE key = 'a'"
            " ORDER BY queue_id, queue_offset"
        ).fetchall()
    return [row[0] for row in rows]


@contextmanager
def key_lock_off(outbox_settings: Callable[..., None]) -> Iterator[None]:
    topics = {**OUTBOX["TOPICS"], "steps": {"types": ["FIFO", "TRANSACTION"], "queue_count": 4, "key_lock": False}}
    outbox_settings(TOPICS=topics)
    switch = "UPDATE outbox.topic SET key_lock = %s WHERE name = 'steps'"
    with broker_connection() as (connection, _):
        connection.execute(switch, [False])
        try:
            yield
        finally:
            connection.execute(switch, [True])


def test_queue_order_is_commit_order(path: str, race: Race) -> None:
    assert race.start("first").wait(10)
    assert not race.start("second").wait(0.3), "the second transaction did not wait for the key"
    race.commit("first")
    race.commit("second")
    assert queued() == race.committed == ["first", "second"]


def test_a_process_that_was_started_before_the_topic_became_fifo_waits_for_the_key(
    path: str, race: Race, outbox_settings: Callable[..., None]
) -> None:
    """A deployment changes the topic in the broker first, and then restarts one process after the other."""
    outbox_settings(TOPICS={**OUTBOX["TOPICS"], "steps": {"queue_count": 4}})
    with transaction.atomic():
        publish("steps", {}, key="b")
    test_queue_order_is_commit_order(path, race)


def test_control_without_the_key_lock_the_order_is_inverted(
    path: str, race: Race, outbox_settings: Callable[..., None]
) -> None:
    with key_lock_off(outbox_settings):
        for name in ("first", "second"):
            assert race.start(name).wait(10)
        race.commit("second")
        race.commit("first")
        assert race.committed == ["second", "first"]
        assert queued() == ["first", "second"]
