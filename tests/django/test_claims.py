"""Claims: a handler with effects="outside" runs without a transaction, and its steps and its end happen once."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.core.checks import run_checks
from django.db import connections, transaction
from django.db.models import QuerySet
from django.urls import reverse

from outbox import Delivery, Message, RetryPolicy
from outbox.broker.database.executor import Executor
from outbox.broker.maintenance import retention
from outbox.contrib.django import ClaimedDelivery, publish, run_prune, subscriber
from outbox.contrib.django.database.effects import allowed, written
from outbox.contrib.django.ledger import handled, pruning
from outbox.contrib.django.models import ClaimEntry, InboxEntry, StepEntry
from outbox.contrib.django.subscribers import claims, outside, registry
from outbox.contrib.django.subscribers.outside import HandlerInvoker
from outbox.contrib.django.testing import in_memory_outbox
from outbox.contrib.django.worker.workers import consumer_runtime
from outbox.errors import (
    ConfigurationError,
    HandlerNotStarted,
    InvalidSubscription,
    LeaseLost,
    PermanentError,
    TransactionUsageError,
)
from outbox.ports import ClaimedElsewhere, Disposition
from outbox.utils.ids import uuid7
from tests.django.operators import ALL, client_of, make_user
from tests.django.sessions import broker_connection
from tests.django.shop.models import Effect
from tests.django.state import effects, execute, renamed
from tests.django.support import call, consume
from tests.django.test_inbox import cut_at_commit, slow_commits, waits_for
from tests.django.threads import in_thread
from tests.django.urls import Refused
from tests.part_apps import has
from tests.support import eventually

pytestmark = pytest.mark.usefixtures("application", "no_subscribers", "no_claims")

HANDLED, SKIPPED = Disposition.HANDLED, Disposition.SKIPPED


def delivery(number: str = "one", topic: str = "orders") -> Delivery:
    message = Message(topic=topic, body=b"{}", key=number, message_id=uuid7())
    return Delivery(message=message, body={}, group="slow", queue=f"{topic}/0", offset=0)


def run(given: Delivery, *, generation: int = 1, claimed: Callable[[float], None] = lambda _: None) -> Any:
    """Hand a delivery to the registered subscriber of group `slow`."""
    registered = next(
        item
        for item in registry.subscribers()
        if item.subscription.group == "slow" and item.subscription.topic == given.topic
    )
    invoker = HandlerInvoker(lease_seconds=10.0, has_generations=True)
    return invoker.claim(registered.subscription, registered.handler, given, claimed, generation=generation)


@pytest.fixture
def short_terms(monkeypatch: pytest.MonkeyPatch) -> None:
    """A claim lasts 0.1 s, while the transactions of an attempt have the limits of a lease of 10 s."""
    monkeypatch.setattr(outside, "TERM_LEASES", 0.01)


def wait_for_renewals(claim: QuerySet[ClaimEntry]) -> None:
    """Wait until the claim was renewed several times from now on."""
    enough = claim.get().expires_at + timedelta(seconds=0.2)
    eventually(lambda: claim.get().expires_at > enough)


def run_in_thread(given: Delivery, **options: Any) -> Any:
    return in_thread(lambda: run(given, **options))


@pytest.fixture(params=["default", "lite"])
def alias(request: pytest.FixtureRequest) -> str:
    """PostgreSQL and SQLite."""
    return str(request.param)


# -- finish ----------------------------------------------------------------------------------------


def test_the_writes_of_finish_and_the_inbox_row_commit_together(alias: str) -> None:
    @subscriber("orders", group="slow", effects="outside", using=alias)
    def slow(given: ClaimedDelivery) -> None:
        assert not connections[alias].in_atomic_block
        assert ClaimEntry.objects.using(alias).count() == 1
        assert not InboxEntry.objects.using(alias).exists()
        with given.finish():
            Effect.objects.using(alias).create(number=given.key)

    once = delivery()
    assert [run(once), run(once)] == [HANDLED, SKIPPED]
    assert effects(alias) == ["one"]
    assert (InboxEntry.objects.using(alias).count(), ClaimEntry.objects.using(alias).count()) == (1, 0)


def test_a_finish_without_an_answer_is_no_failed_attempt() -> None:
    """The server may still commit. If it were the last attempt, a handled message would be a dead letter."""

    @subscriber("orders", group="slow", effects="outside")
    def slow(given: ClaimedDelivery) -> None:
        with given.finish():
            Effect.objects.create(number=given.key)
            cut_at_commit()

    def let_commit(let: Callable[[], None]) -> None:
        with connections["default"].copy().cursor() as cursor:
            # The attempt gives its claim up, and waits for the transaction that deletes it.
            eventually(lambda: waits_for("transactionid", cursor))
            let()
            cursor.connection.close()

    once = delivery()
    connections["default"].ensure_connection()
    with slow_commits() as let, ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(let_commit, let)
        assert isinstance(run(once), LeaseLost)
        waiting.result(20)
    assert run(once) is SKIPPED
    assert effects() == ["one"]


@pytest.mark.parametrize("is_watched", [False, True])
def test_finish_fails_if_a_block_inside_it_is_left_open(alias: str, is_watched: bool) -> None:
    """Otherwise Django would not commit, and the message would be done without its writes."""

    @subscriber("orders", group="slow", effects="outside", using=alias)
    def slow(given: ClaimedDelivery) -> None:
        with given.finish():
            Effect.objects.using(alias).create(number=given.key)
            if given.key == "leaves":
                transaction.atomic(alias, savepoint=False).__enter__()

    watching = connections[alias].execute_wrapper(lambda execute, *statement: execute(*statement))
    with watching if is_watched else contextlib.nullcontext():
        found = run(delivery("leaves"))
    assert isinstance(found, TransactionUsageError) and "has left an atomic() block open" in str(found)
    assert run(delivery("next")) is HANDLED
    connections.close_all()
    assert effects(alias) == ["next"]


def test_a_finish_that_fails_may_be_repeated() -> None:
    @subscriber("orders", group="slow", effects="outside")
    def slow(given: ClaimedDelivery) -> None:
        with contextlib.suppress(Refused), given.finish():
            Effect.objects.create(number="undone")
            raise Refused
        with given.finish():
            Effect.objects.create(number="done")

    assert run(delivery()) == HANDLED
    assert effects() == ["done"]


def test_a_thread_of_the_handler_stores_nothing_after_the_attempt() -> None:
    proceed = threading.Event()
    found: list[Any] = []
    threads: list[threading.Thread] = []

    @subscriber("orders", group="slow", effects="outside")
    def slow(given: ClaimedDelivery) -> None:
        def work() -> None:
            assert proceed.wait(20)
            for act in (lambda: given.step("late", lambda: 1), lambda: given.finish().__enter__()):
                try:
                    act()
                except TransactionUsageError as error:
                    found.append(error)
            connections.close_all()

        threads.append(threading.Thread(target=work))
        threads[0].start()
        raise Refused

    assert isinstance(run(delivery()), Refused)
    proceed.set()
    threads[0].join(20)
    assert len(found) == 2 and all("has failed" in str(error) for error in found)
    assert not StepEntry.objects.exists()


def test_a_raised_generation_runs_the_handler_and_its_steps_again() -> None:
    calls: list[str] = []

    @subscriber("orders", group="slow", effects="outside")
    def slow(given: ClaimedDelivery) -> None:
        given.step("call", calls.append, given.idempotency_key)

    once = delivery()
    assert [run(once, generation=generation) for generation in (1, 2, 2)] == [HANDLED, HANDLED, SKIPPED]
    # A restore of the broker to before the reset brings the older generation back.
    later = delivery()
    assert [run(later, generation=generation) for generation in (2, 1)] == [HANDLED, SKIPPED]
    assert not ClaimEntry.objects.exists()
    # The other system gets the same key, so it can recognise the replay.
    assert calls == [*[once.idempotency_key] * 2, later.idempotency_key]


# -- claims ----------------------------------------------------------------------------------------


def test_a_claimed_message_is_not_handled_a_second_time_meanwhile(alias: str) -> None:
    started, proceed = threading.Event(), threading.Event()

    @subscriber("orders", group="slow", effects="outside", using=alias)
    def slow(given: ClaimedDelivery) -> None:
        started.set()
        assert proceed.wait(20)

    once = delivery()
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(run_in_thread, once)
        assert started.wait(20)
        second = run(once)
        proceed.set()
        assert first.result(20) == HANDLED
    assert isinstance(second, ClaimedElsewhere) and 0 < second.seconds <= 30
    assert run(once) == SKIPPED


@contextlib.contextmanager
def locked(text: str) -> Iterator[None]:
    """Another session holds locks on the database of `default`."""
    with transaction.atomic(using="other"):
        execute(text, alias="other")
        yield


@pytest.mark.usefixtures("short_terms")
@pytest.mark.parametrize("lock", ["the row of another claim", "the other database"])
def test_a_claim_is_renewed_although_others_cannot_be(lock: str) -> None:
    """A `finish` that waits, or a database that does not answer, delays the renewal of no other claim."""
    proceed = threading.Event()
    alias = "lite" if lock == "the other database" else "default"
    text = "LOCK TABLE outbox_claim IN ACCESS EXCLUSIVE MODE"
    if alias == "default":
        text = "SELECT 1 FROM outbox_claim WHERE message_id = (SELECT min(message_id::text)::uuid FROM outbox_claim)"
        text += " FOR UPDATE"

    @subscriber("orders", group="slow", effects="outside")
    def first(given: ClaimedDelivery) -> None:
        assert proceed.wait(20)

    @subscriber("payments", group="slow", effects="outside", using=alias)
    def second(given: ClaimedDelivery) -> None:
        assert proceed.wait(20)

    # The ids are ordered by time.
    deliveries = [delivery("1"), delivery("2", "payments")]
    with ThreadPoolExecutor(2) as pool:
        try:
            calls = [pool.submit(run_in_thread, deliveries[0])]
            eventually(lambda: ClaimEntry.objects.count() == 1)
            calls.append(pool.submit(run_in_thread, deliveries[1]))
            mine = ClaimEntry.objects.using(alias).filter(message_id=deliveries[1].message_id)
            eventually(lambda: mine.exists())
            with locked(text):
                wait_for_renewals(mine)
        finally:
            proceed.set()
        assert [call.result(20) for call in calls] == [HANDLED, HANDLED]


def test_claims_are_renewed_after_the_system_has_refused_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    renewals = claims.Renewals("default")
    claim = claims.Claim("default", "slow", 1, uuid7(), attempt=1, term_seconds=0.3)
    with monkeypatch.context() as refusing:
        refusing.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError), renewals.of(claim, for_seconds=10):
            pass
    assert not renewals.holds(claim)
    with renewals.of(claim, for_seconds=10):
        renewing = renewals.thread
        assert renewing is not None and renewing.is_alive()
    renewing.join(10)


def expire() -> None:
    """As if the process of the claim had been frozen for longer than the term."""
    execute("UPDATE outbox_claim SET expires_at = clock_timestamp()")


def test_a_claim_whose_term_is_over_is_not_taken_from_a_handler_of_this_process() -> None:
    """A process that got no CPU time for a while is given its own message again while its handler still runs."""
    began, may_end = threading.Event(), threading.Event()

    @subscriber("orders", group="slow", effects="outside")
    def slow(given: ClaimedDelivery) -> None:
        began.set()
        assert may_end.wait(20)
        with given.finish():
            Effect.objects.create(number=given.key)

    once = delivery()
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(run_in_thread, once)
        assert began.wait(20)
        expire()
        second = run(once)
        may_end.set()
        assert first.result(20) is HANDLED
    assert isinstance(second, ClaimedElsewhere)
    assert run(once) is SKIPPED
    assert effects() == ["one"]


@pytest.mark.parametrize("late", ["finish", "step"])
def test_an_attempt_whose_claim_was_taken_over_stores_nothing(late: str, monkeypatch: pytest.MonkeyPatch) -> None:
    results: list[Any] = []
    # The second attempt stands for one of another process, which does not see that the first one still runs.
    monkeypatch.setattr(claims, "runs_here", lambda claim: False)

    @subscriber("orders", group="slow", effects="outside")
    def slow(given: ClaimedDelivery) -> None:
        if given.attempt == 2:
            with given.finish():
                Effect.objects.create(number="second")
            return
        with allowed():
            expire()
        results.append(run_in_thread(replace(once, attempt=2)))
        if late == "step":
            given.step("late", lambda: 1)
        with given.finish():
            Effect.objects.create(number="first")

    once = delivery()
    assert isinstance(run(once), LeaseLost)
    assert (results, effects()) == ([HANDLED], ["second"])
    assert run(once) == SKIPPED
    assert not StepEntry.objects.exists()


@pytest.mark.usefixtures("short_terms")
def test_a_handler_past_its_time_limit_loses_its_claim() -> None:
    started, proceed = threading.Event(), threading.Event()

    @subscriber("orders", group="slow", effects="outside", timeout_seconds=0.2)
    def slow(given: ClaimedDelivery) -> None:
        if not started.is_set():
            started.set()
            assert proceed.wait(20)
        with given.finish():
            Effect.objects.create(number="done")

    once = delivery()
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(run_in_thread, once)
        assert started.wait(20)
        eventually(lambda: run(once) == HANDLED)
        proceed.set()
        assert isinstance(first.result(20), LeaseLost)
    assert effects() == ["done"]


def test_an_attempt_from_before_a_redelivery_stores_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process is frozen, another one finishes, an operator has the message handled once more, a third one begins."""
    monkeypatch.setattr(claims, "runs_here", lambda claim: False)
    stored, proceed = threading.Event(), threading.Event()
    third: list[Future[Any]] = []

    @subscriber("orders", group="slow", effects="outside")
    def slow(given: ClaimedDelivery) -> None:
        charged = given.step("charge", lambda: given.attempt)
        if given.attempt == 1:
            with allowed():
                expire()
                assert run_in_thread(replace(once, attempt=2)) == HANDLED
                handled.forget(connections["default"], "slow", once.message_id)
            third.append(pool.submit(run_in_thread, replace(once, attempt=3)))
            assert stored.wait(20)
        if given.attempt == 3:
            stored.set()
            assert proceed.wait(20)
        with given.finish():
            Effect.objects.create(number=f"charged by {charged}, finished by {given.attempt}")

    once = delivery()
    with ThreadPoolExecutor(1) as pool:
        first = run(once)
        proceed.set()
        assert third[0].result(20) == HANDLED
    assert isinstance(first, LeaseLost)
    # The second attempt has found the step of the first one; the third one began anew.
    assert sorted(effects()) == ["charged by 1, finished by 2", "charged by 3, finished by 3"]


@pytest.mark.parametrize("attempts_before", [0, 1])
def test_a_claim_whose_handler_may_not_be_called_ends_at_once(alias: str, attempts_before: int) -> None:
    calls: list[str] = []

    @subscriber("orders", group="slow", effects="outside", using=alias)
    def slow(given: ClaimedDelivery) -> None:
        calls.append(given.key)
        raise Refused

    def refuse(term_seconds: float) -> None:
        tokens.add(ClaimEntry.objects.using(alias).get().token)
        raise ValueError

    tokens: set[int] = set()

    once = delivery()
    for _ in range(attempts_before):
        assert isinstance(run(once), Refused)
        tokens.add(ClaimEntry.objects.using(alias).get().token)
    assert isinstance(run(once, claimed=refuse), ValueError)
    assert len(calls) == attempts_before
    assert len(tokens) == attempts_before + 1
    assert not ClaimEntry.objects.using(alias).exists()
    # The claim has ended: the next attempt can begin.
    assert isinstance(run(once), Refused)


def test_a_database_that_does_not_answer_is_no_attempt() -> None:
    @subscriber("orders", group="slow", effects="outside")
    def slow(given: ClaimedDelivery) -> None:
        raise AssertionError

    settings = connections["default"].settings_dict
    there = settings["NAME"]
    connections["default"].close()
    settings["NAME"] = "nowhere"
    try:
        result = run(delivery())
    finally:
        connections["default"].close()
        settings["NAME"] = there
    assert isinstance(result, HandlerNotStarted) and "nowhere" in str(result)


# -- steps -----------------------------------------------------------------------------------------


def test_a_step_is_computed_once_over_attempts(alias: str) -> None:
    calls: list[str] = []
    results: list[Any] = []

    def charge(amount: int, key: str) -> dict[str, Any]:
        calls.append(key)
        return {"amount": amount, "parts": (1, 2)}

    @subscriber("orders", group="slow", effects="outside", using=alias)
    def slow(given: ClaimedDelivery) -> None:
        results.append(given.step("charge", charge, 5, given.step_key("charge")))
        if len(results) < 3:
            raise Refused

    once = delivery()
    assert [type(run(once)), type(run(once)), run(once)] == [Refused, Refused, HANDLED]
    assert len(calls) == 1
    assert results == [{"amount": 5, "parts": [1, 2]}] * 3


def test_a_step_that_fails_is_repeated_with_the_same_key(alias: str) -> None:
    calls: list[str] = []

    def charge(key: str) -> None:
        calls.append(key)
        if len(calls) == 1:
            raise Refused

    @subscriber("orders", group="slow", effects="outside", using=alias)
    def slow(given: ClaimedDelivery) -> None:
        given.step("charge", charge, given.step_key("charge"))
        given.step("other", calls.append, given.step_key("other"))

    once = delivery()
    assert [type(run(once)), run(once)] == [Refused, HANDLED]
    assert calls[0] == calls[1] != calls[2]


@pytest.mark.parametrize("result", [object(), "x" * 5_000_000, float("nan")])
def test_a_result_that_cannot_be_stored_is_refused(result: object) -> None:
    @subscriber("orders", group="slow", effects="outside")
    def slow(given: ClaimedDelivery) -> None:
        given.step("charge", lambda: result)

    found = run(delivery())
    assert isinstance(found, PermanentError) and "'charge'" in str(found)
    assert not StepEntry.objects.exists()


# -- writes outside of finish -------------------------------------------------------------------------


def _create(_: ClaimedDelivery) -> None:
    Effect.objects.create(number="stray")


def _other_alias(_: ClaimedDelivery) -> None:
    Effect.objects.using("other").create(number="stray")


def _publish(_: ClaimedDelivery) -> None:
    publish("orders", {}, at_once=True)


@pytest.mark.parametrize("write", [_create, _other_alias, _publish])
def test_a_write_outside_of_finish_is_refused_by_name(write: Any) -> None:
    @subscriber("orders", group="slow", effects="outside")
    def slow(given: ClaimedDelivery) -> None:
        write(given)

    # If a receiver of signals is connected, Django deletes only rows that it has read.
    Effect.objects.create(number="there")
    found = run(delivery())
    assert isinstance(found, TransactionUsageError)
    for text in ("slow", "delivery.finish()", "was not done"):
        assert text in str(found)
    assert effects() + effects("other") == ["there"]
    # The guard ends with the handler.
    Effect.objects.create(number="after")


def test_reading_is_allowed() -> None:
    @subscriber("orders", group="slow", effects="outside")
    def slow(given: ClaimedDelivery) -> None:
        with transaction.atomic():
            list(Effect.objects.select_for_update())
        with transaction.atomic(), transaction.atomic():
            assert not Effect.objects.filter(number="it's; DELETE FROM x").exists()

    assert run(delivery()) == HANDLED


def test_which_statements_write() -> None:
    cases: list[tuple[str, str]] = [
        ("SELECT 1", ""),
        ("  -- insert into x\n select 'delete from x'", ""),
        ("SELECT * FROM x FOR UPDATE", ""),
        ("SAVEPOINT one", ""),
        ("WITH one AS (SELECT 1) SELECT * FROM one", ""),
        ("WITH gone AS (DELETE FROM x RETURNING *) SELECT * FROM gone", "DELETE"),
        ('UPDATE "x" SET a = 1', "UPDATE"),
        ("update only a.b as c set d = 1", "UPDATE"),
        ("select 1; insert  into x values (1)", "INSERT"),
        ("TRUNCATE x", "TRUNCATE"),
        ("CREATE TABLE x (a int)", "CREATE"),
        ("MERGE INTO x USING y ON true WHEN MATCHED THEN DELETE", "MERGE"),
        ("SELECT * INTO TEMP x FROM y", "INTO"),
        ("EXPLAIN ANALYZE INSERT INTO x VALUES (1)", "INSERT"),
        *((text, "") for text in ("LISTEN x", "notify x, 'y'", "ANALYZE x", "LOCK TABLE x", "DESCRIBE x", "USE x")),
        ("PREPARE x AS SELECT 1", ""),
        ("EXECUTE x", ""),
        ("PREPARE x AS INSERT INTO y VALUES (1)", "INSERT"),
        ("CALL x()", "CALL"),
        ("DO $$BEGIN END$$", "DO"),
    ]
    for text, word in cases:
        assert written(text) == word


@pytest.mark.parametrize("place", ["default", "other", "BEGIN by hand"])
def test_no_transaction_is_open_during_a_slow_call(place: str) -> None:
    calls: list[str] = []

    @subscriber("orders", group="slow", effects="outside")
    def slow(given: ClaimedDelivery) -> None:
        with contextlib.ExitStack() as stack:
            if place == "BEGIN by hand":
                execute("BEGIN")
            else:
                stack.enter_context(transaction.atomic(using=place))
            if given.key == "step":
                given.step("call", calls.append, "called")
            else:
                stack.enter_context(given.finish())

    for what in ("step", "finish"):
        found = run(delivery(what))
        assert isinstance(found, TransactionUsageError) and "a transaction is open" in str(found)
    assert not calls


# -- declarations ----------------------------------------------------------------------------------


def test_options_that_contradict_claims_and_an_async_handler_are_refused() -> None:
    def slow(given: ClaimedDelivery) -> None: ...

    async def later(given: ClaimedDelivery) -> None: ...

    cases: list[tuple[dict[str, Any], Any, str]] = [
        ({"batch": 2}, slow, "batch"),
        ({"broadcast": True}, slow, "broadcast"),
        ({"idempotent": False}, slow, "idempotent"),
        ({"on_error": {ValueError: "stop"}}, slow, "stop"),
        ({"effects": "elsewhere"}, slow, "elsewhere"),
        ({}, later, "plain function"),
    ]
    for options, handler, text in cases:
        with pytest.raises(InvalidSubscription, match=text):
            subscriber("orders", group="slow", **{"effects": "outside", **options})(handler)


# -- operating --------------------------------------------------------------------------------------


LONG_AGO = datetime(2020, 1, 1, tzinfo=UTC)


@pytest.fixture
def no_rows() -> Iterator[None]:
    """Claims, steps and users are removed after the test."""
    yield
    for model in (ClaimEntry, StepEntry, User):
        model.objects.all().delete()


class Charging:
    """A subscriber that fails after its step while `is_broken`."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.is_broken = True

        @subscriber("orders", group="charging", effects="outside", retry=RetryPolicy(max_attempts=1))
        def charge(given: ClaimedDelivery) -> None:
            given.step("charge", self.calls.append, given.step_key("charge"))
            if self.is_broken:
                raise Refused
            with given.finish():
                Effect.objects.create(number=given.key)


def forget_old_rows() -> None:
    """As if all rows were older than the inbox is kept, then prune."""
    InboxEntry.objects.update(handled_at=LONG_AGO)
    ClaimEntry.objects.update(expires_at=LONG_AGO)
    StepEntry.objects.update(begun_at=LONG_AGO)
    pruning._sweeps.clear()
    run_prune()


@pytest.mark.usefixtures("databases", "no_rows")
@pytest.mark.parametrize("is_discarded", [False, True])
def test_steps_of_a_dead_letter_are_seen_and_kept_and_not_repeated_after_a_replay(is_discarded: bool) -> None:
    charging = Charging()
    receipt = publish("orders", {}, key="one", at_once=True)
    consume()
    shown = json.loads(call("outbox_message", "show", str(receipt.message_id), "--json"))
    assert [(one["name"], one["attempt"], one["bytes"]) for one in shown["steps"]] == [("charge", 1, 4)]
    assert [one["attempt"] for one in shown["claims"]] == [1]
    assert "steps: group charging" in call("outbox_message", "show", str(receipt.message_id))
    if has("console"):
        page = client_of(make_user(*ALL)).get(reverse("outbox:message", args=[receipt.message_id])).content.decode()
        assert "Claims and steps" in page and "<b>charge</b>" in page

    forget_old_rows()
    assert StepEntry.objects.count() == 1
    charging.is_broken = False
    again = ("outbox_message", "redeliver", str(receipt.message_id), "--group", "charging", "--no-input")
    if is_discarded:
        call("outbox_dead_letter", "discard", "charging", str(receipt.message_id), "--no-input")
        call(*again)
    else:
        call("outbox_dead_letter", "replay", "charging", str(receipt.message_id))
    consume()
    assert list(Effect.objects.values_list("number", flat=True)) == ["one"]
    assert len(charging.calls) == 1
    call(*again)
    consume()
    assert len(charging.calls) == 2, "the handled message is handled as if for the first time"


@pytest.mark.usefixtures("databases", "no_rows")
def test_claims_and_steps_go_when_the_message_cannot_come_again() -> None:
    charging = Charging()
    charging.is_broken = False
    publish("orders", {}, key="one", at_once=True)
    consume()
    forget_old_rows()
    assert (StepEntry.objects.count(), InboxEntry.objects.count()) == (1, 1)
    with broker_connection() as (connection, schema):
        connection.execute("UPDATE outbox.commit_log SET stored_at = stored_at - interval '20 days'")
        assert retention.run_once(Executor(connection, schema)).messages == 1
    forget_old_rows()
    assert (StepEntry.objects.count(), InboxEntry.objects.count()) == (0, 0)


@pytest.mark.usefixtures("databases", "no_rows")
def test_a_redelivery_that_bypasses_the_inbox_runs_steps_and_finish_again() -> None:
    charging = Charging()
    charging.is_broken = False
    with in_memory_outbox() as outbox:
        publish("orders", {}, key="one", at_once=True)
        outbox.drain()
        assert outbox.redeliver() == 0
        assert [outbox.redeliver(bypass_inbox=True) for _ in range(2)] == [1, 1]
        charging.is_broken = True
        with pytest.raises(Refused):
            outbox.redeliver(bypass_inbox=True)
    assert list(Effect.objects.values_list("number", flat=True)) == ["one"] * 3
    # The other system gets the same key, so it can recognise the repetition.
    assert len(charging.calls) == 4 and len(set(charging.calls)) == 1


@pytest.mark.usefixtures("databases", "no_rows")
def test_a_worker_names_the_missing_tables() -> None:
    Charging()
    with renamed("outbox_step"), pytest.raises(ConfigurationError, match="'outbox_step' is missing"):
        consumer_runtime()


def checks() -> dict[str, Any]:
    return {str(item.id): item for item in run_checks() if str(item.id) in ("outbox.E034", "outbox.I035")}


@pytest.mark.usefixtures("databases", "no_rows")
def test_check_compares_time_limits() -> None:
    @subscriber("orders", group="one")
    def usual(given: Delivery) -> None: ...

    assert checks() == {}

    @subscriber("orders", group="two", timeout_seconds=3600)
    def long(given: Delivery) -> None: ...

    assert list(checks()) == ["outbox.I035"]
    registry.unregister_all()
    Charging()
    assert checks() == {}


@pytest.mark.usefixtures("databases", "no_rows")
def test_check_names_a_database_without_claims(monkeypatch: pytest.MonkeyPatch) -> None:
    from outbox.contrib.django.operations.checks import _slow_calls
    from outbox.contrib.django.settings.conf import get_settings

    Charging()
    [item] = registry.subscribers()
    with monkeypatch.context() as patch:
        patch.setattr(connections["default"], "vendor", "oracle")
        found = next(iter(_slow_calls(item, get_settings())))
    assert found.id == "outbox.E034" and "oracle" in found.msg
