"""The connections of consumer processes: how many they open, pools, and transactions that meet others."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from typing import Any

import psycopg
import pytest
from django.core.checks import run_checks
from django.db import OperationalError, connections

from outbox import Delivery
from outbox.contrib.django import publish, publish_many, subscriber
from outbox.contrib.django.database.aliases import alias_conninfo
from outbox.contrib.django.database.database_errors import MAX_TRIES
from outbox.contrib.django.ledger.ledger_checker import open_connection
from outbox.contrib.django.worker.workers import consumer_runtime
from tests.django.processes import child
from tests.django.shop.models import Effect, Order
from tests.django.state import effects, execute
from tests.django.test_inbox import HANDLED, delivery, run
from tests.support import eventually

COUNT = 150
PROBE = "tests"


def sessions() -> Counter[str]:
    """The sessions on both databases by their names, without those of this process.

    Those of this process have no name. The server still lists a closed one for a moment.
    """
    connections.close_all()
    found: Counter[str] = Counter()
    for alias in ("default", "broker"):
        with psycopg.connect(alias_conninfo(alias), application_name=PROBE, autocommit=True) as connection:
            found.update(
                f"{alias} {name}"
                for (name,) in connection.execute(
                    "SELECT application_name FROM pg_stat_activity WHERE datname = current_database() "
                    "AND backend_type = 'client backend' AND application_name NOT IN ('', %s)",
                    [PROBE],
                )
            )
    return found


def failures() -> set[str]:
    """The errors of failed attempts."""
    with psycopg.connect(alias_conninfo("broker"), autocommit=True) as connection:
        return {error.splitlines()[0] for (error,) in connection.execute("SELECT error FROM outbox.failure")}


def publish_to_both() -> None:
    for topic in ("orders", "payments"):
        publish_many(topic, [{}] * COUNT, key=topic, at_once=True)
    connections.close_all()


def database(name: str = "handlers", **options: Any) -> dict[str, Any]:
    """The changes to the alias `default` of a process, whose sessions then have a name."""
    given = connections["default"].settings_dict["OPTIONS"]
    return {"OPTIONS": {**given, "application_name": name, **options}, "CONN_MAX_AGE": 0}


@pytest.mark.slow
@pytest.mark.usefixtures("databases")
def test_two_subscribers_of_eight_threads_share_a_pool_of_four() -> None:
    publish_to_both()
    pool = {"min_size": 1, "max_size": 4, "timeout": 10}
    most = 0

    def all_handled() -> bool:
        nonlocal most
        most = max(most, sessions()["default handlers"])
        return Effect.objects.count() == 3 * COUNT

    with child("broker", quiet=True), child("consumer", quiet=True, default=database(pool=pool)):
        eventually(all_handled, within_seconds=100, what=lambda: f"{Effect.objects.count()} effects: {failures()}")
    assert 1 <= most <= 4
    # The handler's own: it fails at every first attempt.
    assert failures() == {"RuntimeError: the first attempt of every payment fails"}


@pytest.mark.slow
@pytest.mark.usefixtures("databases")
def test_what_a_worker_opens() -> None:
    """The budget in docs/operations/connections.md."""
    publish_to_both()
    of_broker, of_consumer = database("of the broker process"), database()
    with child("broker", quiet=True, default=of_broker), child("consumer", quiet=True, default=of_consumer):
        eventually(lambda: Effect.objects.count() == 3 * COUNT, within_seconds=100, what="all effects")
        found = sessions()
    several = ("default handlers", "broker outbox", "broker outbox-one-way")
    assert {name for name, number in found.items() if number > 1} <= set(several)
    # One per handler thread of the process, whatever the number of subscribers, and as many to publish with.
    assert found.pop("default handlers") <= 8
    assert found.pop("broker outbox", 0) <= 8
    # One in each process.
    assert found["broker outbox-one-way"] <= 2
    # The last comes and goes.
    assert found.keys() - {"broker outbox-maintenance"} == {
        "broker outbox-broker",
        "broker outbox-consumer",
        "broker outbox-coordinator",
        "broker outbox-one-way",
    }


@pytest.mark.usefixtures("databases", "no_subscribers")
def test_a_subscriber_holds_a_connection_per_busy_thread_and_none_while_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(connections.settings["default"]["OPTIONS"], "application_name", "handlers")
    monkeypatch.setattr("outbox.broker.consumer.scheduler.IDLE_SECONDS", 0.2)
    all_busy, counted = threading.Barrier(8 + 1), threading.Event()

    @subscriber("orders", group="effects", using="default")
    def effect(given: Delivery) -> None:
        Effect.objects.create(number=given.key)
        if given.key != "later":
            all_busy.wait(60)
            counted.wait(60)

    def handled(count: int) -> None:
        eventually(lambda: Effect.objects.count() == count, within_seconds=60)

    publish_many("orders", [{}] * 8, key="now", at_once=True)
    with child("broker", quiet=True), background(consumer_runtime().run):
        all_busy.wait(60)
        assert sessions()["default handlers"] == 8
        counted.set()
        handled(8)
        eventually(lambda: sessions()["default handlers"] == 0)
        publish("orders", {}, key="later", at_once=True)
        handled(9)
        eventually(lambda: sessions()["default handlers"] == 0)


@contextmanager
def background(run: Callable[[threading.Event], None]) -> Iterator[None]:
    """Let it run in a thread meanwhile."""
    stop = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(run, stop)
        try:
            yield
        finally:
            stop.set()
        running.result(30)


@pytest.mark.usefixtures("application", "no_subscribers")
def test_a_pool_that_is_too_small_is_named_with_the_numbers(outbox_settings: Callable[..., None]) -> None:
    """Each of both remedies ends the warning: a larger pool, and fewer threads."""
    for number in (1, 2):
        subscriber("orders", group=f"group{number}", threads=8)(lambda given: None)
    options = connections["default"].settings_dict["OPTIONS"]
    try:
        for pool, threads, wanted in (
            (True, 8, True),
            ({"max_size": 7}, 8, True),
            ({"max_size": 8}, 8, False),
            ({"max_size": 4}, 8, True),
            ({"max_size": 4}, 4, False),
        ):
            options["pool"] = pool
            outbox_settings(HANDLER_THREADS=threads)
            found = [str(message.msg) for message in run_checks(tags=["outbox"]) if message.id == "outbox.W016"]
            assert bool(found) is wanted, (pool, threads)
            assert all("8 threads" in text and "['max_size'] = 8" in text for text in found)
    finally:
        options.pop("pool", None)


@pytest.mark.usefixtures("application", "no_subscribers")
def test_a_consumer_warns_when_it_starts(caplog: pytest.LogCaptureFixture) -> None:
    subscriber("orders", group="effects", threads=3, using="other")(lambda given: None)
    other: Any = connections["other"]
    other.close()
    other.settings_dict["OPTIONS"]["pool"] = {"min_size": 0, "max_size": 2}
    try:
        consumer_runtime()
    finally:
        other.close()
        other.close_pool()
        del other.settings_dict["OPTIONS"]["pool"]
    [said] = [record.getMessage() for record in caplog.records if "threads" in record.getMessage()]
    assert "3 threads on 'other'" in said
    assert "has only 2 connections. So 1 threads may wait" in said


@pytest.fixture
def serializable(application: None, no_subscribers: None) -> Iterator[None]:
    """Handlers in SERIALIZABLE transactions, and a row that they and others change."""
    Order.objects.create(number="counter", status="0")
    execute("SET default_transaction_isolation = 'serializable'")
    yield
    connections["default"].close()


def count_once() -> str:
    """Read the row and write what follows from it."""
    order = Order.objects.get(number="counter")
    order.status = str(int(order.status) + 1)
    order.save()
    return order.status


def meddle() -> None:
    """Another session changes the row meanwhile."""
    with closing(open_connection("default")) as other, other.cursor() as cursor:
        cursor.execute("UPDATE shop_order SET status = (status::integer + 1)::text WHERE number = 'counter'")


@pytest.mark.usefixtures("serializable")
@pytest.mark.parametrize("wrap", [False, True])
def test_a_serialisation_failure_is_repeated_at_once(wrap: bool) -> None:
    """Also when the handler raises its own error from it."""
    attempts: list[int] = []

    @subscriber("orders", group="effects")
    def effect(given: Delivery) -> None:
        attempts.append(given.attempt)
        Order.objects.get(number="counter")
        if len(attempts) < 3:
            meddle()
        try:
            count_once()
        except OperationalError as error:
            if wrap:
                raise ValueError("no") from error
            raise
        Effect.objects.create(number=given.key)

    assert run([delivery("one")]) == [HANDLED]
    assert attempts == [1, 1, 1]
    assert effects() == ["one"]
    assert Order.objects.get(number="counter").status == "3"


@pytest.mark.usefixtures("serializable")
def test_it_is_not_repeated_for_ever() -> None:
    attempts: list[int] = []

    @subscriber("orders", group="effects")
    def effect(given: Delivery) -> None:
        attempts.append(given.attempt)
        Order.objects.get(number="counter")
        meddle()
        count_once()

    [result] = run([delivery("one")])
    assert isinstance(result, OperationalError)
    assert len(attempts) == MAX_TRIES


@pytest.mark.usefixtures("application", "no_subscribers")
def test_two_handlers_in_a_deadlock_are_both_handled() -> None:
    Order.objects.bulk_create([Order(number="a"), Order(number="b")])
    both = threading.Barrier(2)
    met: set[str] = set()

    @subscriber("orders", group="effects")
    def effect(given: Delivery) -> None:
        first, second = given.key, {"a": "b", "b": "a"}[given.key]
        Order.objects.filter(number=first).update(status="paid")
        if given.key not in met:
            met.add(given.key)
            both.wait(30)
        Order.objects.filter(number=second).update(status="paid")

    assert in_threads(lambda key: run([delivery(key)]), ["a", "b"]) == [[HANDLED], [HANDLED]]


@pytest.mark.usefixtures("application", "no_subscribers")
def test_handlers_on_sqlite_take_turns() -> None:
    """Its one writer is waited for, longer than SQLite would wait."""
    for settings in (connections["lite"].settings_dict, connections.settings["lite"]):
        settings["OPTIONS"]["timeout"] = 0.01
    pause = threading.Event()

    @subscriber("orders", group="effects", using="lite")
    def effect(given: Delivery) -> None:
        Effect.objects.using("lite").create(number=given.key)
        pause.wait(0.1)

    try:
        results = in_threads(lambda key: run([delivery(key)]), "abcdefgh")
    finally:
        for settings in (connections["lite"].settings_dict, connections.settings["lite"]):
            settings["OPTIONS"]["timeout"] = 20
    assert results == [[HANDLED]] * 8
    assert effects("lite") == list("abcdefgh")


@pytest.mark.usefixtures("application", "no_subscribers")
def test_a_writer_of_another_process_on_sqlite_costs_no_attempt() -> None:
    connections["lite"].settings_dict["OPTIONS"]["timeout"] = 0.01
    connections["lite"].close()
    tries: list[str] = []

    @subscriber("orders", group="effects", using="lite")
    def effect(given: Delivery) -> None:
        Effect.objects.using("lite").create(number=given.key)

    other = open_connection("lite")
    other.ensure_connection()
    other.connection.execute("BEGIN IMMEDIATE")

    def let_go(execute: Callable[..., Any], sql: str, *rest: Any) -> Any:
        tries.append(sql)
        if len(tries) == 3:
            other.connection.execute("ROLLBACK")
        return execute(sql, *rest)

    try:
        with closing(other), connections["lite"].execute_wrapper(let_go):
            assert run([delivery("one")]) == [HANDLED]
    finally:
        connections["lite"].settings_dict["OPTIONS"]["timeout"] = 20
        connections["lite"].close()
    assert effects("lite") == ["one"]


def in_threads(call: Callable[[str], Any], keys: Any) -> list[Any]:
    """Call for each key in a thread of its own."""

    def one(key: str) -> Any:
        try:
            return call(key)
        finally:
            connections.close_all()

    with ThreadPoolExecutor(len(keys)) as pool:
        return list(pool.map(one, keys))
