"""The inbox: the effects of a handler in its database happen once."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import sqlite3
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from uuid import UUID

import pytest
from django.db import DatabaseError, IntegrityError, OperationalError, connections, transaction

from outbox import Delivery, Message
from outbox.contrib.django import subscriber
from outbox.contrib.django.subscribers import registry
from outbox.contrib.django.subscribers.inbox import InboxEntries, InboxInvoker
from outbox.errors import (
    HandlerNotStarted,
    LeaseLost,
    PartialFailure,
)
from outbox.ports import Disposition
from outbox.utils.ids import uuid7
from tests.django.shop.models import Effect
from tests.django.state import effects, execute
from tests.django.urls import Refused
from tests.support import eventually

pytestmark = pytest.mark.usefixtures("application", "no_subscribers")

HANDLED, SKIPPED = Disposition.HANDLED, Disposition.SKIPPED


def delivery(number: str, message_id: UUID | None = None) -> Delivery:
    message = Message(topic="orders", body=b"{}", key=number, message_id=message_id or uuid7())
    return Delivery(message=message, body={}, group="effects", queue="orders/0", offset=0)


def run(deliveries: Sequence[Delivery], *, generation: int = 1, lease_seconds: float = 10.0) -> list[Any]:
    """Hand deliveries to the registered subscriber of group `effects`."""
    registered = next(item for item in registry.subscribers() if item.subscription.group == "effects")
    invoker = InboxInvoker(lease_seconds=lease_seconds, has_generations=generation > 1)
    return list(invoker(registered.subscription, registered.handler, deliveries, generation=generation))


@pytest.fixture(params=["default", "lite"])
def alias(request: pytest.FixtureRequest) -> str:
    """PostgreSQL and SQLite."""
    return str(request.param)


def register(alias: str = "default", **options: Any) -> None:
    @subscriber("orders", group="effects", using=alias, **options)
    def effect(given: Any) -> None:
        for item in given if isinstance(given, list) else [given]:
            Effect.objects.using(alias).create(number=item.key)
            if item.key == "poison":
                raise Refused


def test_a_repeated_delivery_is_skipped(alias: str) -> None:
    register(alias)
    once = delivery("one")
    assert run([once]) == [HANDLED]
    assert run([once]) == [SKIPPED]
    assert effects(alias) == ["one"]


def test_a_failed_delivery_leaves_nothing_and_may_come_again(alias: str) -> None:
    register(alias)
    poison = delivery("poison")
    for _ in range(2):
        assert isinstance(run([poison])[0], Refused)
    assert effects(alias) == []


def test_a_raised_generation_processes_again(alias: str) -> None:
    register(alias)
    once = delivery("one")
    assert [run([once], generation=generation) for generation in (1, 2, 2)] == [[HANDLED], [HANDLED], [SKIPPED]]
    assert effects(alias) == ["one", "one"]


def test_a_restored_generation_skips_what_a_later_one_has_handled(alias: str) -> None:
    """After a restore of the broker, a group may have the generation from before a reset."""
    register(alias)
    first, second = delivery("one"), delivery("two")
    assert run([first], generation=5) == run([second], generation=9) == [HANDLED]
    assert [run([one], generation=4) for one in (first, second)] == [[SKIPPED]] * 2
    assert run([delivery("three")], generation=4) == [HANDLED]
    assert effects(alias) == ["one", "three", "two"]


def test_a_batch_enters_the_inbox_as_one_and_meets_only_what_is_new(alias: str) -> None:
    """Also after a restore: another message was handled in a later generation."""
    register(alias, batch=10)
    for before, generation in ((1, 1), (3, 2)):
        seen = delivery("seen")
        assert run([seen], generation=before) == [HANDLED]
        batch = [delivery("a"), seen, delivery("b")]
        assert run(batch, generation=generation) == [HANDLED, SKIPPED, HANDLED]
        assert run(batch, generation=generation) == [SKIPPED] * 3
    assert effects(alias) == ["a", "a", "b", "b", "seen", "seen"]


def test_one_message_twice_in_a_batch_takes_effect_once(alias: str) -> None:
    """A redelivery and the retry of the same message may wait side by side in one process."""
    register(alias, batch=10)
    first, second = delivery("one"), delivery("two")
    assert run([first, second, delivery("one", first.message_id)]) == [HANDLED, HANDLED, SKIPPED]
    assert effects(alias) == ["one", "two"]


def test_a_batch_that_fails_fails_whole(alias: str) -> None:
    register(alias, batch=10)
    assert [type(item) for item in run([delivery("a"), delivery("poison"), delivery("b")])] == [Refused] * 3
    assert effects(alias) == []


def test_partial_failure_keeps_the_rest_of_the_batch(alias: str) -> None:
    @subscriber("orders", group="effects", batch=10, using=alias)
    def effect(deliveries: Sequence[Delivery]) -> None:
        errors: dict[UUID, Exception] = {}
        for item in deliveries:
            try:
                with transaction.atomic(using=alias):
                    Effect.objects.using(alias).create(number=item.key)
                    if item.key == "poison":
                        raise Refused
            except Refused as error:
                errors[item.message_id] = error
        if errors:
            raise PartialFailure(errors)

    batch = [delivery("a"), delivery("poison"), delivery("b")]
    results = run(batch)
    assert (results[0], type(results[1]), results[2]) == (HANDLED, Refused, HANDLED)
    assert effects(alias) == ["a", "b"]
    assert isinstance(run(batch)[1], Refused)
    assert effects(alias) == ["a", "b"]


_SLOW_COMMIT = """
CREATE FUNCTION hang() RETURNS trigger LANGUAGE plpgsql AS
    $$ BEGIN PERFORM pg_advisory_xact_lock(7); RETURN NULL; END $$;
CREATE CONSTRAINT TRIGGER hang AFTER INSERT ON shop_effect DEFERRABLE INITIALLY DEFERRED
    FOR EACH ROW EXECUTE FUNCTION hang();
"""


@contextlib.contextmanager
def slow_commits() -> Iterator[Callable[[], None]]:
    """Inside the block, the COMMIT of an effect waits in the server for the end of the block, or for the returned
    function."""
    with connections["default"].copy().cursor() as cursor:
        cursor.execute(_SLOW_COMMIT)
        cursor.execute("SELECT pg_advisory_lock(7)")
        try:
            yield lambda: cursor.execute("SELECT pg_advisory_unlock(7)")
        finally:
            cursor.execute("SELECT pg_advisory_unlock_all()")
            cursor.execute("DROP FUNCTION hang() CASCADE")
            cursor.connection.close()


def cut_at_commit() -> None:
    """Wait until a session waits in COMMIT, and cut its connection, as a broken network does."""
    raw = connections["default"].connection
    connection = socket.socket(fileno=os.dup(raw.fileno()))

    def cut() -> None:
        with connections["default"].copy().cursor() as cursor:
            eventually(lambda: waits_for("advisory", cursor))
            cursor.connection.close()
        connection.shutdown(socket.SHUT_RDWR)
        connection.close()

    threading.Thread(target=cut).start()


def waits_for(locktype: str, cursor: Any) -> bool:
    """Whether a session waits for a lock of this type."""
    cursor.execute("SELECT count(*) FROM pg_locks WHERE locktype = %s AND NOT granted", [locktype])
    return bool(cursor.fetchone()[0])


@pytest.mark.parametrize("is_watched", [False, True])
def test_a_commit_without_an_answer_is_no_failed_attempt(is_watched: bool) -> None:
    """The server may still commit. If it were the last attempt, a handled message would be a dead letter."""

    @subscriber("orders", group="effects")
    def effect(given: Delivery) -> None:
        Effect.objects.create(number=given.key)
        cut_at_commit()

    once = delivery("one")
    connections["default"].ensure_connection()
    watched = connections["default"].execute_wrapper(lambda execute, *rest: execute(*rest))
    with watched if is_watched else contextlib.nullcontext(), slow_commits():
        [result] = run([once])
    assert isinstance(result, LeaseLost)
    assert run([once]) == [SKIPPED]
    assert effects() == ["one"]


def test_a_transaction_that_was_idle_at_its_end_is_a_failed_attempt() -> None:
    """The server has rolled it back before COMMIT arrived. As an attempt that may have committed, it had no limit."""

    @subscriber("orders", group="effects")
    def effect(given: Delivery) -> None:
        Effect.objects.create(number=given.key)
        execute("SET LOCAL idle_in_transaction_session_timeout = '20ms'")
        poll = select.poll()
        poll.register(connections["default"].connection.fileno(), select.POLLRDHUP)
        assert poll.poll(20_000), "the server has closed the connection"

    [result] = run([delivery("one")])
    assert isinstance(result, OperationalError) and "effects='outside'" in str(result)
    assert effects() == []


def test_two_processes_handling_one_message_at_once_effect_it_once() -> None:
    register()
    once = delivery("one")
    start = threading.Barrier(2)

    def one() -> Any:
        try:
            start.wait()
            return run([once])
        finally:
            connections.close_all()

    with ThreadPoolExecutor(2) as pool:
        results = [future.result() for future in [pool.submit(one), pool.submit(one)]]
    assert sorted(results) == [[HANDLED], [SKIPPED]]
    assert effects() == ["one"]


def test_a_frozen_owner_blocks_its_successor_no_longer_than_half_a_lease() -> None:
    register()
    once = delivery("one")
    with transaction.atomic():
        InboxEntries(connections["default"], "effects", 1).enter([once], lease_seconds=60)

        def successor() -> Any:
            try:
                return run([once], lease_seconds=0.4)
            finally:
                connections.close_all()

        with ThreadPoolExecutor(1) as pool:
            result = pool.submit(successor).result(20)
    assert isinstance(result[0], HandlerNotStarted)
    assert "lock timeout" in str(result[0])


def test_an_owner_idle_in_its_transaction_is_ended_before_its_lease() -> None:
    released = threading.Event()

    @subscriber("orders", group="effects")
    def freeze(given: Delivery) -> None:
        Effect.objects.create(number=given.key)
        assert execute("SELECT current_setting('idle_in_transaction_session_timeout')")[0] == ("400ms",)
        released.wait(1.0)
        Effect.objects.create(number="late")

    assert isinstance(run([delivery("frozen")], lease_seconds=0.5)[0], DatabaseError)
    assert effects() == []
    registry.unregister_all()
    register()
    assert run([delivery("after")]) == [HANDLED]


@pytest.mark.parametrize("options", [{"idempotent": False}, {"broadcast": True}], ids=str)
def test_without_idempotence_and_in_a_broadcast_group_there_is_no_inbox(options: dict[str, Any]) -> None:
    """The inbox is one per group: the second instance would skip what the first has handled."""
    register(**options)
    twice = delivery("twice")
    assert [run([twice]), run([twice])] == [[HANDLED], [HANDLED]]
    assert effects() == ["twice", "twice"]


def test_a_session_that_the_server_has_ended_is_replaced_before_the_next_message() -> None:
    """A restart of the server ends the idle sessions of all handler threads, and none of them may cost a failure."""
    register()
    assert run([delivery("one")]) == [HANDLED]
    before = execute("SELECT pg_backend_pid()")[0]
    with connections["other"].cursor() as cursor:
        # Returns once the session is gone.
        cursor.execute("SELECT pg_terminate_backend(%s, 60000)", before)
        assert cursor.fetchone() == (True,)
    assert run([delivery("two")]) == [HANDLED]
    assert effects() == ["one", "two"]


def test_a_session_that_ends_while_the_transaction_begins_is_no_attempt(monkeypatch: pytest.MonkeyPatch) -> None:
    register()
    assert run([delivery("one")]) == [HANDLED]
    enter = InboxEntries.enter

    def ended(inbox: InboxEntries, *given: Any, **options: Any) -> Any:
        with connections["default"].cursor() as cursor, contextlib.suppress(DatabaseError):
            cursor.execute("SELECT pg_terminate_backend(pg_backend_pid())")
        return enter(inbox, *given, **options)

    with monkeypatch.context() as patched:
        patched.setattr(InboxEntries, "enter", ended)
        assert isinstance(run([delivery("two")])[0], HandlerNotStarted)
    assert run([delivery("three")]) == [HANDLED]
    assert effects() == ["one", "three"]


def test_an_inbox_row_that_sqlite_refuses_skips_no_message() -> None:
    """Only a row that is there already does."""
    with pytest.raises(IntegrityError), transaction.atomic("lite"):
        InboxEntries(connections["lite"], None, 1).enter([delivery("one")], lease_seconds=10.0)  # type: ignore[arg-type]


def test_a_locked_sqlite_is_no_attempt() -> None:
    called: list[str] = []

    @subscriber("orders", group="effects", using="lite")
    def effect(given: Delivery) -> None:
        called.append(given.key)

    with contextlib.closing(sqlite3.connect(connections["lite"].settings_dict["NAME"])) as other:
        other.execute("BEGIN IMMEDIATE")
        execute("PRAGMA busy_timeout = 50", alias="lite")
        [result] = run([delivery("one")])
        assert isinstance(result, HandlerNotStarted) and "database is locked" in str(result)
        other.rollback()
    assert called == []
    assert run([delivery("one")]) == [HANDLED]
