"""Shared transactions as they run in production: poolers, connection settings, stops, deaths, and other features."""

from __future__ import annotations

import contextlib
import functools
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from django.db import OperationalError, connection, connections, transaction

from outbox import Delivery, Message, OnError, RetryPolicy
from outbox.broker.consumer.runtime import ConsumerRuntime
from outbox.broker.consumer.subscription_runner import SubscriptionCalls
from outbox.broker.process import run_broker
from outbox.contrib.django import subscriber
from outbox.contrib.django.database.aliases import broker_database
from outbox.contrib.django.settings.conf import get_settings
from outbox.contrib.django.subscribers import registry
from outbox.contrib.django.subscribers.inbox import InboxInvoker
from outbox.topic import Topic
from tests.django.effects.own_transaction import transaction_id
from tests.django.entry_points import say
from tests.django.processes import child, process
from tests.django.shop.models import Effect, Payment
from tests.django.state import postgres_broker
from tests.django.test_inbox import effects
from tests.django.test_poolers import OLD, behind
from tests.django.test_shared_transactions import (
    ALONE,
    HANDLED,
    alone,
    deliveries,
    handle_with,
    setting,
    share,
)
from tests.django.urls import Refused
from tests.support import eventually

pytestmark = pytest.mark.usefixtures("databases", "no_subscribers", "calls_share")


# -- a broker and consumers in this process --------------------------------------------------------


@contextlib.contextmanager
def running(*works: Callable[[threading.Event], Any]) -> Iterator[None]:
    """Run each work in a thread, until the block ends."""
    stop = threading.Event()
    threads = [threading.Thread(target=work, args=(stop,)) for work in works]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join(30)
            assert not thread.is_alive()


def leading() -> Callable[[threading.Event], Any]:
    database = broker_database(get_settings())
    return lambda stop: run_broker(database, stop)


def consuming(lease_seconds: float = 10.0, *, threads: int | None = None) -> Callable[[threading.Event], Any]:
    """All subscribers; `threads` replaces their own number of threads."""
    invoker = InboxInvoker(lease_seconds=lease_seconds)
    return ConsumerRuntime(
        broker_database(get_settings()),
        [
            (replace(item.subscription, threads=threads or item.subscription.threads), item.handler)
            for item in registry.subscribers()
        ],
        invoker=invoker,
        share=invoker.share,
        sharing_calls=16,
        lease_seconds=lease_seconds,
    ).run


def send(count: int, *, queues: int = 2) -> None:
    postgres_broker().declare([Topic(name="orders", queue_count=queues)])
    postgres_broker().send([Message(topic="orders", body=b"{}", key=str(number)) for number in range(count)])


class Noted:
    """The transactions of the handlers, by message."""

    def __init__(self) -> None:
        self.transactions: dict[str, int] = {}

    def note(self, given: Delivery) -> None:
        self.transactions[given.key] = transaction_id()

    @property
    def largest(self) -> int:
        return max(Counter(self.transactions.values()).values())


def each_once(count: int) -> None:
    eventually(lambda: len(set(effects())) == count, within_seconds=40, what=lambda: str(len(effects())))
    assert sorted(effects()) == sorted(map(str, range(count)))


def failed() -> list[str]:
    with connections["broker"].cursor() as cursor:
        cursor.execute("SELECT l.key FROM outbox.failure f JOIN outbox.commit_log l USING (log_id)")
        return [key for (key,) in cursor.fetchall()]


# -- connections -----------------------------------------------------------------------------------

POOL = {"min_size": 2, "max_size": 8}


@pytest.mark.parametrize(
    ("options", "shares"),
    [
        ({"CONN_MAX_AGE": 0}, True),
        ({"CONN_MAX_AGE": 3600, "CONN_HEALTH_CHECKS": True}, True),
        ({"ATOMIC_REQUESTS": True}, True),
        ({"CONN_MAX_AGE": 0, "OPTIONS": {"pool": POOL}}, True),
        ({"OPTIONS": {"isolation_level": 3}}, False),
        ({"OPTIONS": {"options": "-c default_transaction_isolation=serializable"}}, False),
        ({"OPTIONS": {"server_side_binding": True}}, True),
        ({"DISABLE_SERVER_SIDE_CURSORS": True}, True),
    ],
    ids=["age-0", "health-checks", "requests", "pool", "isolation", "isolation-of-session", "binding", "no-cursors"],
)
def test_connection_settings(options: dict[str, Any], shares: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    noted = Noted()
    handle_with(noted.note)
    send(60)
    # The connections of the consumer's threads are made with these settings. The connection of this thread is open,
    # unless it must come from the pool, too.
    assert effects() == []
    is_pool = "pool" in options.get("OPTIONS", {})
    if is_pool:
        connection.close()
    with monkeypatch.context() as patch:
        for key, value in options.items():
            patch.setitem(connections.settings["default"], key, value)
        try:
            with running(leading(), consuming()):
                each_once(60)
        finally:
            if is_pool:
                connection.close()
                connection.close_pool()  # type: ignore[attr-defined]
    assert (noted.largest > 1) is shares
    # Transactions of a stricter isolation level may stop each other; their messages are then delivered again.
    assert failed() == [] or not shares


@pytest.mark.skipif(OLD.program is None, reason="PgBouncer is not installed")
def test_a_pooler_in_transaction_mode(server_url: str, outbox_settings: Callable[..., None]) -> None:
    """Failing messages roll back to savepoints on the same session; nothing stays on a session of the pool."""
    outbox_settings(LISTEN_URL="")
    noted = Noted()

    def handle(given: Delivery) -> None:
        noted.note(given)
        if given.key in ("33", "66") and given.attempt == 1:
            raise Refused

    @subscriber("orders", group="effects", threads=3, retry=RetryPolicy(delays_seconds=[0.1]))
    def effect(given: Delivery) -> None:
        Effect.objects.create(number=given.key)
        handle(given)

    with behind(server_url, OLD, size=3):
        send(150)
        with running(leading(), consuming()):
            each_once(150)
        for _ in range(6):
            with transaction.atomic():
                found = [setting(name) for name in ("lock_timeout", "statement_timeout")]
            assert found == ["0", "0"]
    assert noted.largest > 1


# -- statements that hang --------------------------------------------------------------------------


def sleep(seconds: float) -> None:
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_sleep(%s)", [seconds])


def test_a_statement_that_hangs_delays_the_earlier_messages_a_moment_only() -> None:
    handle_with(lambda given: sleep(1.5) if given.key == "slow" else None)
    given = deliveries("a", "slow", "later")
    began = time.monotonic()
    assert share(*given)[0] == [HANDLED, ALONE]
    assert time.monotonic() - began < 1.4
    assert effects() == ["a"]
    # Alone, the statement has all its time.
    assert alone(given[1]) is HANDLED


def test_a_shorter_limit_of_the_project_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    limits: list[str] = []
    handle_with(lambda given: limits.append(setting("statement_timeout")))
    given = deliveries(*"abcdef")
    assert share(*given[:3])[0] == [HANDLED] * 3
    assert limits == ["0", "500ms", "500ms"]
    for limit in ("200ms", "1min"):
        limits.clear()
        connection.close()
        monkeypatch.setitem(connection.settings_dict, "OPTIONS", {"options": f"-c statement_timeout={limit}"})
        with contextlib.suppress(OperationalError):
            assert share(*deliveries("x", "y", "z"))[0] == [HANDLED] * 3
        expected = "200ms" if limit == "200ms" else "500ms"
        assert limits == [limit, expected, expected]
    connection.close()


def test_commit_has_no_limit() -> None:
    """A deferred trigger, or a replica that must confirm, may take longer than a statement of a joined message."""
    with connection.cursor() as cursor:
        cursor.execute(
            "CREATE FUNCTION slow_commit() RETURNS trigger LANGUAGE plpgsql AS"
            " 'BEGIN PERFORM pg_sleep(0.8); RETURN NULL; END';"
            "CREATE CONSTRAINT TRIGGER slow AFTER INSERT ON shop_payment DEFERRABLE INITIALLY DEFERRED"
            " FOR EACH ROW EXECUTE FUNCTION slow_commit()"
        )
    try:
        handle_with(lambda given: Payment.objects.create(reference="b") if given.key == "b" else None)
        assert share(*deliveries("a", "b"))[0] == [HANDLED] * 2
    finally:
        with connection.cursor() as cursor:
            cursor.execute("DROP FUNCTION slow_commit CASCADE")


@pytest.mark.parametrize("hang", [sleep, time.sleep], ids=["statement", "python"])
def test_a_handler_that_hangs_charges_and_delays_no_other_message(hang: Callable[[float], None]) -> None:
    """The others of its transaction are handled long before a statement ends; when the process gives a handler up that
    hangs in Python, the server ends its transaction."""

    @subscriber("orders", group="effects", threads=2, timeout_seconds=1, retry=RetryPolicy(delays_seconds=[30]))
    def effect(given: Delivery) -> None:
        Effect.objects.create(number=given.key)
        if given.key == "30" and given.attempt == 1:
            hang(8)

    send(60, queues=1)
    with running(leading(), consuming(lease_seconds=4)):
        began = time.monotonic()
        eventually(lambda: len(set(effects())) == 59, within_seconds=30, what=lambda: str(len(effects())))
        assert time.monotonic() - began < 7
        eventually(lambda: failed() == ["30"])
    assert failed() == ["30"]
    assert len(effects()) == 59


def test_a_callback_that_hangs_charges_no_other_message() -> None:
    """Each callback runs within the time limit of its own message."""
    hung: list[str] = []
    groups: list[int] = []
    release = threading.Event()

    def hang(key: str) -> None:
        hung.append(key)
        release.wait(8)

    @subscriber("orders", group="effects", timeout_seconds=1, threads=1)
    def effect(given: Delivery) -> None:
        Effect.objects.create(number=given.key)
        groups.append(transaction_id())
        # It is the second message of a transaction.
        if groups.count(groups[-1]) == 2 and not hung:
            transaction.on_commit(functools.partial(hang, given.key))

    send(60, queues=1)
    with running(leading(), consuming()):
        eventually(lambda: len(set(effects())) == 60 and bool(hung), within_seconds=15)
        # Longer than the time limit: the process has given the callback up.
        eventually(lambda: failed() != [], within_seconds=10)
        release.set()
    assert failed() == hung


# -- stops and deaths ------------------------------------------------------------------------------

NOTES = {"TOPICS": {"notes": {"queue_count": 2}}, "MESSAGES_PER_COMMIT": 16}
NOTING: dict[str, Any] = {"outbox": NOTES, "subscribers": "effects.noting"}


def send_notes(count: int) -> None:
    postgres_broker().declare([Topic(name="notes", queue_count=2)])
    postgres_broker().send([Message(topic="notes", body=b"{}", key=str(number)) for number in range(count)])


def notes_once(count: int) -> None:
    made = [number.split(":") for number in effects()]
    assert Counter(key for key, _ in made) == Counter(map(str, range(count)))
    assert max(Counter(own for _, own in made).values()) > 1, "no transaction was shared"


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_sigterm_in_the_middle_of_shared_transactions() -> None:
    count = 400
    send_notes(count)
    with child("broker", **NOTING, quiet=True):
        slow = "consumer.before_inbox_commit=delay:0.01"
        for least in (30, 150):
            with child("consumer", **NOTING, quiet=True, faults=slow) as stopping:
                eventually(lambda least=least: len(effects()) > least, within_seconds=40)  # type: ignore[misc]
                stopping.send_signal(signal.SIGTERM)
                assert stopping.wait(20) == 0
            # All offsets are stored, so nothing is delivered again.
            assert unstored() == 0
        with child("consumer", **NOTING, quiet=True):
            eventually(lambda: len(effects()) >= count, within_seconds=60)
    notes_once(count)
    assert failed() == []


def unstored() -> int:
    """The number of handled messages whose offset is not stored."""
    with connections["broker"].cursor() as cursor:
        cursor.execute(
            "SELECT sum(stored) FROM (SELECT max(next_offset) AS stored FROM outbox.consumer_offset"
            " GROUP BY group_id, queue_id) AS positions"
        )
        (stored,) = cursor.fetchone()
    return len(effects()) - int(stored)


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    "kill",
    [
        pytest.param("before_handler=kill@42", marks=pytest.mark.slow),
        "before_inbox_commit=kill@9",
        pytest.param("after_inbox_commit=kill@9", marks=pytest.mark.slow),
        pytest.param("before_offset=kill@2", marks=pytest.mark.slow),
    ],
)
def test_sigkill(kill: str) -> None:
    """Between two handlers, before COMMIT, after COMMIT, and before the offsets are stored."""
    count = 200
    send_notes(count)
    with child("broker", **NOTING, quiet=True):
        with child("consumer", **NOTING, faults=f"consumer.{kill}", quiet=True) as victim:
            assert victim.wait(60) == -signal.SIGKILL
        with child("consumer", **NOTING, quiet=True):
            eventually(lambda: len(effects()) >= count, within_seconds=60)
    notes_once(count)


def is_still() -> bool:
    before = len(effects())
    time.sleep(0.5)
    return len(effects()) == before


def test_a_queue_that_a_failure_stops() -> None:
    @subscriber("orders", group="effects", threads=2, on_error={Refused: OnError.STOP})
    def effect(given: Delivery) -> None:
        Effect.objects.create(number=given.key)
        if given.key == "40" and not resumed:
            raise Refused

    resumed: list[int] = []
    send(100, queues=1)
    with running(leading(), consuming()):
        eventually(lambda: "39" in effects(), within_seconds=30)
        eventually(lambda: is_still(), within_seconds=30)
        assert "40" not in effects()
        assert len(effects()) == len(set(effects())) < 100
        resumed.append(1)
        assert say("outbox_group resume effects")[0]
        each_once(100)


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_a_rebalance_in_the_middle() -> None:
    """A second process joins, the first one leaves: each effect is there once, and no message fails."""
    handle_with(lambda given: time.sleep(0.002))
    count = 1200
    send(count, queues=4)
    with running(leading()):
        with running(consuming(lease_seconds=2)):
            eventually(lambda: len(effects()) > 100, within_seconds=40)
            with running(consuming(lease_seconds=2)):
                eventually(lambda: len(effects()) > 500, within_seconds=40)
        assert len(effects()) < count
        with running(consuming(lease_seconds=2)):
            each_once(count)
    assert failed() == []


@pytest.mark.slow
def test_nothing_leaks(monkeypatch: pytest.MonkeyPatch) -> None:
    """After errors, failed commits and callbacks with errors, each counter of the threads is at zero."""
    pools: list[SubscriptionCalls] = []
    original = SubscriptionCalls.__init__

    def made(self: SubscriptionCalls, *arguments: Any, **options: Any) -> None:
        pools.append(self)
        original(self, *arguments, **options)

    monkeypatch.setattr(SubscriptionCalls, "__init__", made)
    monkeypatch.setattr("outbox.broker.consumer.call._PAUSES", SimpleNamespace(pause_seconds=lambda _: 0.01))

    @subscriber("orders", group="effects", threads=3, retry=RetryPolicy(delays_seconds=[0.05, 0.05]))
    def effect(given: Delivery) -> None:
        number = int(given.key)
        Effect.objects.create(number=given.key)
        if number % 37 == 5 and given.attempt == 1:
            raise Refused
        if number % 41 == 7 and given.attempt == 1:
            Payment.objects.create(reference="same")
            Payment.objects.create(reference="same")
        if number % 29 == 3:
            transaction.on_commit(refuse)

    def refuse() -> None:
        raise Refused

    count = 900
    send(count)
    with running(leading(), consuming()):
        each_once(count)
        [pool] = pools
        eventually(
            lambda: (pool.in_hand, pool.serving, len(pool.waiting), pool.stuck) == (0, 0, 0, 0),
            what=lambda: str((pool.in_hand, pool.serving, len(pool.waiting), pool.stuck)),
        )


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_only_the_guilty_message_of_a_death_is_suspected() -> None:
    """Message 40 kills its process in a callback, when its transaction has committed. Message 77 kills it always."""
    count = 200
    send_notes(count)
    suspected: set[str] = set()

    def quarantined() -> set[str]:
        with connections["broker"].cursor() as cursor:
            cursor.execute("SELECT l.key FROM outbox.quarantined_message JOIN outbox.commit_log l USING (log_id)")
            suspected.update(key for (key,) in cursor.fetchall())
        return suspected

    with process(["-m", "django", "outbox_worker"], outbox=NOTES, subscribers="effects.dying", quiet=True):
        eventually(lambda: "77" in quarantined(), within_seconds=60, what=lambda: str(suspected))
        # The others do not wait until message 77 has killed three processes more.
        eventually(
            lambda: quarantined() and len(effects()) >= count - 1, within_seconds=60, what=lambda: str(len(effects()))
        )
    made = [number.split(":") for number in effects()]
    assert Counter(key for key, _ in made) == Counter(str(n) for n in range(count) if n != 77)
    assert max(Counter(own for _, own in made).values()) > 1, "no transaction was shared"
    # A message that was alone in its transaction is noted until its callbacks have ended. The inbox skips it then.
    assert suspected <= {"40", "77"}
    assert set(failed()) <= {"77"}
