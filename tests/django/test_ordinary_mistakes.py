"""Transactions that a block or a handler ends by hand, and what the look-up of a ledger row proves.

tests/mistakes has the other ordinary mistakes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import pytest
from django.conf import settings as django_settings
from django.db import DatabaseError, connections, transaction
from django.test.utils import CaptureQueriesContext, override_settings
from psycopg import sql

from outbox import Delivery
from outbox.broker.database.arrays import UUIDS
from outbox.broker.database.statement import UUID_, Statement
from outbox.contrib.django import publish, run_check_back, subscriber, transactional_message
from outbox.contrib.django.ledger import ledger
from outbox.errors import TransactionUsageError
from outbox.ports import Disposition
from tests.django.shop.models import Effect, Order, Payment
from tests.django.state import decisions, effects, execute, stored
from tests.django.test_inbox import delivery, run
from tests.django.urls import Refused

pytestmark = pytest.mark.usefixtures("empty_log")


def settled() -> tuple[bool, bool]:
    """Whether the order exists, and whether its message is delivered once everything is decided."""
    stored()
    run_check_back()
    return Order.objects.filter(number="k").exists(), decisions().get("k") == "C"


def test_an_absent_row_is_a_hint_and_never_a_rollback() -> None:
    """The end of a block whose error was swallowed: nothing is decided before check-back has looked."""
    with transaction.atomic():
        publish("orders", {}, key="k")
        with contextlib.suppress(DatabaseError):
            execute("SELECT 1/0")
    assert decisions() == {"k": None}
    assert pending() == 1, "check-back was not asked to look soon"
    assert run_check_back().rolled_back == 1
    assert decisions() == {"k": "R"}


def pending() -> int:
    return int(execute("SELECT count(*) FROM outbox.pending_check WHERE due_at <= now()", alias="broker")[0][0])


def test_a_commit_by_hand_then_an_exception_is_not_reported_as_rollback(path: str) -> None:
    @transactional_message("orders", key="k", body={})
    def work() -> None:
        Order.objects.create(number="k")
        connections["default"].connection.commit()
        raise ValueError("after its own COMMIT")

    with pytest.raises(ValueError, match="after its own COMMIT"):
        work()
    if path == "two_phase":
        assert decisions() == {"k": None}
    assert settled() == (True, True)


@pytest.mark.parametrize(
    "statement",
    ["COMMIT", "end", "ROLLBACK", "abort work", "SELECT 1; COMMIT", "SAVEPOINT s; COMMIT", "COMMIT AND CHAIN"],
)
def test_ending_a_block_by_hand_after_publish_is_refused_before_it_happens(path: str, statement: str) -> None:
    with transaction.atomic():
        publish("orders", {}, key="k")
        Order.objects.create(number="k")
        with pytest.raises(TransactionUsageError, match="was not executed"):
            execute(statement)
    assert settled() == (True, True)


@pytest.mark.parametrize(
    "statement",
    [
        "SAVEPOINT s; ROLLBACK TO SAVEPOINT s",
        "SAVEPOINT s; ROLLBACK WORK TO s; RELEASE s",
        "SELECT 'x; COMMIT'",
        "DO $$ BEGIN PERFORM 1; END $$",
    ],
)
def test_what_only_looks_like_the_end_of_a_transaction_is_executed(path: str, statement: str) -> None:
    with transaction.atomic():
        Order.objects.create(number="k")
        execute(statement)
        publish("orders", {}, key="k")
        execute(statement)
    assert settled() == (True, True)


@pytest.mark.parametrize("alias", ["default", "lite"])
def test_a_transaction_begun_by_hand_outside_of_atomic_is_refused(alias: str) -> None:
    execute("BEGIN", alias=alias)
    try:
        with pytest.raises(TransactionUsageError, match="begun by hand"):
            publish("orders", {}, key="k", using=alias, at_once=True)
    finally:
        execute("ROLLBACK", alias=alias)
    assert stored() == []


def test_a_row_that_was_read_on_a_replica_proves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The statement asks where it is: a server in recovery says nothing."""
    asks = "NOT pg_is_in_recovery()"
    one, several = (found.text for found in (ledger._COMMITTED_ONE, ledger._COMMITTED_POSTGRESQL))
    assert asks in one and asks in several
    with transaction.atomic():
        publish("orders", {}, key="k")
        monkeypatch.setattr(ledger, "_COMMITTED_ONE", Statement(one.replace(asks, "false"), (UUID_,), (UUID_,)))
    with transaction.atomic():
        publish("orders", {}, key="a")
        publish("orders", {}, key="b")
        monkeypatch.setattr(
            ledger, "_COMMITTED_POSTGRESQL", Statement(several.replace(asks, "false"), (UUIDS,), (UUID_,))
        )
    assert decisions() == {"k": None, "a": None, "b": None}
    assert run_check_back().committed == 3


def test_the_look_up_after_a_commit_is_prepared_until_the_application_deallocates_it() -> None:
    def prepared() -> int:
        return int(execute("SELECT count(*) FROM pg_prepared_statements WHERE statement LIKE '%outbox_ledger%'")[0][0])

    for key in ("a", "b"):
        with transaction.atomic():
            publish("orders", {}, key=key)
    assert prepared() == 1
    execute("DEALLOCATE ALL")
    for key in ("c", "d"):
        with transaction.atomic():
            publish("orders", {}, key=key)
    assert prepared() == 0, "an application that deallocates it may do so again"
    assert decisions() == dict.fromkeys("abcd", "C")


def test_all_that_a_block_published_is_looked_up_at_once() -> None:
    with CaptureQueriesContext(connections["default"]) as queries, transaction.atomic():
        for number in range(5):
            publish("orders", {}, key=str(number))
    assert sum("= ANY" in query["sql"] for query in queries) == 1
    assert set(decisions().values()) == {"C"}


# -- handlers -------------------------------------------------------------------------------------


@pytest.mark.usefixtures("application", "no_subscribers")
@pytest.mark.parametrize("alias", ["default", "lite"])
def test_a_handler_cannot_commit_by_hand(alias: str) -> None:
    attempts: list[int] = []

    @subscriber("orders", group="effects", using=alias)
    def effect(given: Delivery) -> None:
        attempts.append(1)
        Effect.objects.using(alias).create(number=given.key)
        if len(attempts) == 1:
            execute("COMMIT", alias=alias)

    one = delivery("one")
    assert isinstance(run([one])[0], TransactionUsageError)
    assert effects(alias) == []
    assert run([one]) == [Disposition.HANDLED]
    assert effects(alias) == ["one"]


@pytest.mark.parametrize("end", ["commit", "rollback"])
def test_a_block_that_has_only_published_notices_that_its_transaction_was_ended(path: str, end: str) -> None:
    def block() -> None:
        with transaction.atomic():
            publish("orders", {}, key="first")
            getattr(connections["default"].connection, end)()
            publish("orders", {}, key="second")

    with pytest.raises(TransactionUsageError, match="was ended by hand"):
        block()
    assert "second" not in {one.key for one in stored()}


# -- writes on another database than the transaction that decides -----------------------------------


@pytest.fixture
def _routed(empty_log: None) -> Iterator[None]:
    routers = ["tests.django.shop.routers.PaymentsElsewhere", *django_settings.DATABASE_ROUTERS]
    with override_settings(DATABASE_ROUTERS=routers):
        yield


def save() -> None:
    Payment.objects.create(reference="routed")


def in_a_block_of_its_own() -> None:
    with transaction.atomic(using="other"):
        save()


def raw(statement: str | sql.Composable) -> Callable[[], None]:
    def write() -> None:
        execute(statement, alias="other")

    return write


@pytest.mark.usefixtures("_routed")
@pytest.mark.parametrize(
    "write",
    [
        *(save, in_a_block_of_its_own),
        raw("-- a comment\nINSERT INTO shop_payment (reference) VALUES ('routed')"),
        raw(
            "/* a comment */ with new as (insert into shop_payment (reference) values ('routed') returning 1) table new"
        ),
        raw(sql.SQL("UPDATE shop_payment SET reference = {}").format("routed")),
    ],
)
def test_without_using_a_write_elsewhere_is_refused_before_it_is_executed(write: Callable[[], None]) -> None:
    """Also if the function swallows the error."""
    Payment.objects.create(reference="there")

    @transactional_message("orders", key="lost", body={})
    def pay(swallowed: type[Exception]) -> None:
        Order.objects.create(number="lost")
        with contextlib.suppress(swallowed):
            write()

    for swallowed in (Refused, TransactionUsageError):
        with pytest.raises(TransactionUsageError, match=r"pay wrote to 'other'.*'default'.*using='other'"):
            pay(swallowed)
    run_check_back()
    assert decisions() == {"lost": "R"}
    assert not Order.objects.exists()
    assert list(Payment.objects.values_list("reference", flat=True)) == ["there"]


@pytest.mark.usefixtures("_routed")
def test_of_several_swallowed_writes_elsewhere_the_last_one_is_raised() -> None:
    @transactional_message("orders", key="lost", body={})
    def pay() -> None:
        for write in (save, raw("DELETE FROM shop_payment")):
            with contextlib.suppress(TransactionUsageError):
                write()

    with pytest.raises(TransactionUsageError, match=r"pay wrote to 'other' \(DELETE"):
        pay()


@pytest.mark.usefixtures("_routed")
def test_using_names_the_transaction_that_decides() -> None:
    @transactional_message("payments", key=lambda reference: reference, body={}, using="other")
    def pay(reference: str, *, fail: bool = False) -> None:
        Payment.objects.create(reference=reference)
        if fail:
            raise Refused

    pay("kept")
    with pytest.raises(Refused):
        pay("dropped", fail=True)
    assert decisions() == {"kept": "C", "dropped": "R"}
    assert list(Payment.objects.values_list("reference", flat=True)) == ["kept"]


@pytest.mark.usefixtures("_routed")
def test_using_may_also_say_that_other_writes_go_their_own_way() -> None:
    @transactional_message("orders", key="kept", body={}, using="default")
    def place() -> None:
        Order.objects.create(number="kept")
        save()

    place()
    assert decisions() == {"kept": "C"}
    assert Payment.objects.count() == 1


@pytest.mark.usefixtures("_routed")
def test_a_nested_call_that_names_its_own_database_is_free_and_the_outer_one_watched_again() -> None:
    @transactional_message("payments", key="inner", body={}, using="other")
    def pay() -> None:
        save()

    @transactional_message("orders", key="outer", body={})
    def place() -> None:
        Order.objects.create(number="outer")
        pay()
        assert Payment.objects.count() == 1
        with pytest.raises(TransactionUsageError, match="'other'"):
            save()

    with pytest.raises(TransactionUsageError, match="'other'"):
        place()
    run_check_back()
    assert decisions() == {"outer": "R", "inner": "C"}
    Payment.objects.create(reference="outside of any call")
