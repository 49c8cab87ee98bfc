"""What a handler leaves behind on its thread: the next message meets none of it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Iterator
from contextvars import Context, ContextVar
from dataclasses import dataclass
from typing import Any, Final

import pytest
from asgiref.sync import sync_to_async
from django.conf import settings
from django.db import connections, transaction
from django.db.backends.signals import connection_created
from django.test.utils import CaptureQueriesContext, override_settings
from django.utils import timezone, translation

from outbox import Delivery, RetryPolicy
from outbox.contrib.django import ClaimedDelivery, publish, subscriber
from outbox.contrib.django.database.transactions import _changes_session
from outbox.contrib.django.subscribers import registry
from outbox.contrib.django.subscribers.inbox import InboxInvoker
from outbox.contrib.django.subscribers.outside import HandlerInvoker
from outbox.contrib.django.testing import in_memory_outbox
from outbox.contrib.django.worker.workers import consumer_runtime
from outbox.errors import HandlerNotStarted, TransactionUsageError
from outbox.utils import log_context
from tests.django import configured
from tests.django.sessions import broker_connection
from tests.django.shop.models import Effect
from tests.django.state import effects
from tests.django.support import consume, sequence
from tests.django.test_inbox import delivery, run
from tests.django.test_shared_transactions import HANDLED, deliveries, share
from tests.django.urls import Refused
from tests.part_apps import has

pytestmark = pytest.mark.usefixtures("databases", "no_subscribers")

_left: Final[ContextVar[str]] = ContextVar("left", default="")

# Each changes the session of the connection.
CHANGES: Final = (
    "SET search_path TO pg_temp, public",
    "SET statement_timeout = '1h'",
    "SET ROLE pg_monitor",
    "/* a comment */ set session timezone to 'Asia/Tokyo'",
    "SELECT set_config('app.tenant', 'a', false)",
    "SELECT 1; SET app.tenant = 'a'",
    "DO $$ BEGIN PERFORM set_config('app.tenant', 'a', false); END $$",
    "CREATE TEMP TABLE left_behind (a int)",
    "RESET ALL",
)
STATE: Final = """
SELECT current_setting('search_path'), current_setting('statement_timeout'), current_user, current_setting('timezone'),
       coalesce(current_setting('app.tenant', true), ''), to_regclass('left_behind') IS NULL
"""


@pytest.fixture(params=[False, True], ids=["unwatched", "watched"])
def is_watched(request: pytest.FixtureRequest) -> Iterator[bool]:
    """Without an execute wrapper of the application, and with one: then Django executes all statements."""
    if not request.param:
        yield False
        return
    with connections["default"].execute_wrapper(lambda execute, *statement: execute(*statement)):
        yield True


def execute(*statements: str) -> list[Any]:
    with connections["default"].cursor() as cursor:
        for statement in statements:
            cursor.execute(statement)
        return cursor.fetchall() if cursor.description else []


def observed() -> tuple[Any, ...]:
    """What a handler finds on its thread."""
    [state] = execute(STATE)
    return (*state, translation.get_language(), timezone.get_current_timezone_name(), _left.get())


def pollute(given: Delivery, seen: list[tuple[Any, ...]]) -> None:
    """Note what there is, then leave everything behind that a handler can leave."""
    seen.append(observed())
    Effect.objects.create(number=given.key)
    translation.activate("de")
    timezone.activate("Asia/Tokyo")
    _left.set(given.key)


def handle(*given: Delivery) -> list[Any]:
    """As a consumer's thread does: log records know the message."""
    with log_context.handling(given):
        return run(given)


def test_the_next_message_meets_no_language_time_zone_or_variable() -> None:
    """With both engines; several messages of a subscription with one thread, alone and in a shared transaction."""
    for per_commit in (1, 16):
        seen: list[tuple[Any, ...]] = []
        later: list[tuple[str, str]] = []

        def note(given: Delivery, seen: list[tuple[Any, ...]] = seen, later: list[tuple[str, str]] = later) -> None:
            pollute(given, seen)
            transaction.on_commit(lambda: later.append((given.key, f"{translation.get_language()} {_left.get()}")))

        async def note_async(given: Delivery, note: Callable[[Delivery], None] = note) -> None:
            await sync_to_async(note)(given)

        keys = [f"k{number}" for number in range(6)]
        for function in (note, note_async):
            subscriber("orders", group="effects", threads=1)(function)
            for key in keys:
                publish("orders", {}, key=key, at_once=True)
            sequence()
            with override_settings(OUTBOX={**configured.OUTBOX, "MESSAGES_PER_COMMIT": per_commit}):
                consumer_runtime().run_once()
            with in_memory_outbox() as outbox, translation.override("fr"):
                for key in keys:
                    publish("orders", {}, key=key, at_once=True)
                outbox.drain()
            registry.unregister_all()
            Effect.objects.all().delete()
        assert len(seen) == 4 * len(keys)
        assert {one[-3:] for one in seen} == {(settings.LANGUAGE_CODE, settings.TIME_ZONE, "")}
        # The callbacks of a message belong to its handler.
        assert sorted(later) == sorted([(key, f"de {key}") for key in keys] * 4)


def test_a_message_that_joins_has_a_context_of_its_own(is_watched: bool) -> None:
    """Its spans and log records, too."""
    seen: list[tuple[Any, ...]] = []
    later: list[str] = []

    @subscriber("orders", group="effects")
    def note(given: Delivery) -> None:
        pollute(given, seen)
        transaction.on_commit(lambda: later.append(f"{translation.get_language()} {_left.get()}"))

    given = deliveries("a", "b", "c")
    results, _ = Context().run(share, *given)
    assert results[0] is HANDLED
    # If Django executes the statements, no message joins.
    joined = [one for one, result in zip(given, results, strict=False) if result is HANDLED]
    assert len(joined) == (1 if is_watched else 3)
    assert {one[-3:] for one in seen} == {(settings.LANGUAGE_CODE, settings.TIME_ZONE, "")}
    assert later == [f"de {one.key}" for one in joined]


def test_a_session_that_a_handler_has_changed_is_closed(is_watched: bool) -> None:
    expected: list[tuple[Any, ...]] = []

    @subscriber("orders", group="effects")
    def clean(given: Delivery) -> None:
        expected.append(observed())

    assert handle(delivery("clean")) == [HANDLED]
    for changes in CHANGES:
        for is_later in (False, True):
            registry.unregister_all()
            seen: list[tuple[Any, ...]] = []

            def change(changes: str = changes) -> None:
                execute(changes)

            @subscriber("orders", group="effects")
            def effect(
                given: Delivery,
                seen: list[tuple[Any, ...]] = seen,
                change: Callable[[], None] = change,
                # The other role may not read the inbox.
                is_later: bool = is_later or "ROLE" in changes,
            ) -> None:
                seen.append(observed())
                transaction.on_commit(change) if is_later else change()

            assert [handle(delivery(key)) for key in "ab"] == [[HANDLED]] * 2
            assert seen == expected * 2, changes


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("is_inner", [False, True])
def test_a_forgotten_block_that_python_collects_ends_no_block_of_a_later_message(
    is_inner: bool, is_watched: bool
) -> None:
    """Otherwise the later handler's writes are rolled back, and those after them commit at once."""
    forgotten: list[Any] = []

    @subscriber("orders", group="effects")
    def effect(given: Delivery) -> None:
        if given.key == "forgets":
            forgotten.append(_inside_a_block("default"))
            next(forgotten[0])
            return
        with transaction.atomic() if is_inner else contextlib.nullcontext():
            Effect.objects.create(number="before")
            forgotten.clear()
            Effect.objects.create(number="after")
        if given.key == "fails":
            raise Refused

    assert isinstance(handle(delivery("forgets"))[0], TransactionUsageError)
    assert isinstance(handle(delivery("fails"))[0], Refused)
    assert effects() == []
    assert isinstance(handle(delivery("forgets"))[0], TransactionUsageError)
    assert handle(delivery("later")) == [HANDLED]
    assert effects() == ["after", "before"]


def _noting(alias: str, name: str, met: list[str]) -> Generator[None, None, None]:
    """Inside of an execute wrapper, which notes its name for each statement."""

    def note(execute: Callable[..., Any], *statement: Any) -> Any:
        met.append(name)
        return execute(*statement)

    with connections[alias].execute_wrapper(note):
        yield


@pytest.mark.parametrize("alias", ["default", "other"])
@pytest.mark.parametrize("options", [{}, {"idempotent": False}, {"effects": "outside"}], ids=str)
def test_no_later_message_meets_an_execute_wrapper_that_a_handler_has_left(
    options: dict[str, Any], alias: str, is_watched: bool
) -> None:
    """Nor does its late end take the wrapper of a later message, or the watch of outbox, away."""
    kept: list[Generator[None, None, None]] = []
    met: list[str] = []

    def noting(name: str) -> Generator[None, None, None]:
        return _noting(alias, name, met)

    @subscriber("orders", group="effects", using="default", **options)
    def effect(given: Any) -> None:
        if given.key == "leaves":
            connections[alias].ensure_connection()
            kept.append(noting("left"))
            next(kept[0])
        elif given.key == "ends":
            own = noting("own")
            next(own)
            kept.clear()
            Effect.objects.using(alias).count()
            own.close()
            Effect.objects.using(alias).count()

    [registered] = registry.subscribers()

    def call(key: str) -> list[str]:
        results = HandlerInvoker()(registered.subscription, registered.handler, [delivery(key)], generation=1)
        assert list(results) == [HANDLED]
        found = [*met]
        met.clear()
        return found

    call("leaves")
    before = list(connections[alias].execute_wrappers)
    assert call("later") == []
    assert call("ends") == ["own"]
    assert list(connections[alias].execute_wrappers) == before
    assert len(before) == 1 + (is_watched and alias == "default")


def test_a_message_that_joins_meets_no_execute_wrapper_of_the_message_before_it() -> None:
    kept: list[Generator[None, None, None]] = []
    met: list[str] = []

    @subscriber("orders", group="effects")
    def effect(given: Delivery) -> None:
        met.append(given.key)
        if given.key == "a":
            kept.append(_noting("default", "left", met))
            next(kept[0])
            return
        Effect.objects.create(number=given.key)

    results, _ = share(*deliveries("a", "b"))
    assert [results[0], met] == [HANDLED, ["a", "b"]]


def test_a_setting_for_the_transaction_keeps_the_connection(is_watched: bool) -> None:
    sessions: list[Any] = []

    @subscriber("orders", group="effects")
    def effect(given: Delivery) -> None:
        execute(
            "SET LOCAL search_path TO public",
            "SELECT set_config('app.tenant', 'a', true), lower('set x')",
            "SET CONSTRAINTS ALL IMMEDIATE",
            "CREATE TEMP TABLE dropped (a int) ON COMMIT DROP",
        )
        publish("orders", {}, key="next")
        Effect.objects.create(number=given.key)
        sessions.extend(execute("SELECT pg_backend_pid()"))

    assert [handle(delivery(key)) for key in "abc"] == [[HANDLED]] * 3
    assert len(sessions) == 3
    assert len(set(sessions)) == 1


def test_what_the_project_sets_when_a_connection_is_opened_stays() -> None:
    """It is not taken for a change of the handler, although the handler opens the connection."""

    def prepare(connection: Any, **_: Any) -> None:
        with connection.cursor() as cursor:
            cursor.execute("SET app.tenant = 'of the project'")

    sessions: list[Any] = []

    @subscriber("orders", group="effects")
    def effect(given: Delivery) -> None:
        with connections["other"].cursor() as cursor:
            cursor.execute("SELECT pg_backend_pid(), current_setting('app.tenant')")
            sessions.extend(cursor.fetchall())

    connection_created.connect(prepare)
    try:
        connections.close_all()
        assert [handle(delivery(key)) for key in "ab"] == [[HANDLED]] * 2
    finally:
        connection_created.disconnect(prepare)
        connections.close_all()
    assert sessions[0][1] == "of the project"
    assert sessions[0] == sessions[1]


def test_handlers_without_inbox_or_transaction_leave_nothing() -> None:
    """In effects="outside", in an on_commit callback, and without the inbox."""
    for options in ({"idempotent": False}, {"effects": "outside"}, {"batch": 2}):
        registry.unregister_all()
        seen: list[tuple[Any, ...]] = []

        @subscriber("orders", group="effects", threads=1, **options)
        def effect(given: Any, seen: list[tuple[Any, ...]] = seen) -> None:
            if not isinstance(given, ClaimedDelivery):
                pollute(given[0] if isinstance(given, list) else given, seen)
                transaction.on_commit(lambda: execute("SET search_path TO pg_catalog") and None)
                return
            seen.append(observed())
            execute("SET app.tenant = 'mine'")
            given.step("look", lambda: None)
            # The handler keeps its session during a step.
            assert execute("SELECT current_setting('app.tenant')") == [("mine",)]

        for key in ("a", "b"):
            publish("orders", {}, key=key, at_once=True)
            consume()
        assert len(seen) == 2
        assert seen[0] == seen[1], options


def test_the_query_log_does_not_grow() -> None:
    @subscriber("orders", group="effects")
    def effect(given: Delivery) -> None:
        Effect.objects.create(number=given.key)
        logged.append(len(connections["default"].queries_log))

    logged: list[int] = []
    with override_settings(DEBUG=True):
        for number in range(5):
            handle(delivery(str(number)))
        assert logged[0] > 0
        assert set(logged[1:]) == {logged[1]}
        # A test that captures queries still sees all of them.
        with CaptureQueriesContext(connections["default"]) as captured:
            handle(delivery("captured 1"))
            handle(delivery("captured 2"))
    assert sum("shop_effect" in query["sql"] for query in captured.captured_queries) == 2


def test_which_statements_change_the_session() -> None:
    for vendor, changes, does_not in (
        (
            "postgresql",
            [*CHANGES, "set role x", "DISCARD ALL", "SELECT set_config('a.b', f(1, true), %s)"],
            [
                *("SET LOCAL ROLE x", "SET TRANSACTION READ ONLY", "UPDATE t SET a = 1", "SELECT 'set x'", "SETTLE"),
                "SELECT set_config('a.b', coalesce(%s, ''), true), set_config(%s, 'x', TRUE)",
                "CREATE TABLE temp_x (a int)",
                "-- SET a = 1\nSELECT 1",
            ],
        ),
        (
            "mysql",
            [
                "SET SESSION sql_mode = ''",
                "SET @a = 1",
                "set names latin1",
                "USE other",
                "CREATE TEMPORARY TABLE t (a int)",
            ],
            [
                "SET TRANSACTION READ ONLY",
                "SET STATEMENT innodb_lock_wait_timeout = 1 FOR SELECT 1",
                "UPDATE t SET a = 1",
            ],
        ),
        (
            "sqlite",
            ["PRAGMA foreign_keys = OFF", "ATTACH DATABASE 'x' AS y", "CREATE TEMP TABLE t (a int)"],
            ["PRAGMA table_info(t)", "UPDATE t SET a = 1"],
        ),
    ):
        assert [text for text in changes if not _changes_session(text, vendor)] == [], vendor
        assert [text for text in does_not if _changes_session(text, vendor)] == [], vendor


# Blocks that a handler leaves open. `kept` has generators inside a block, as a cache or a traceback keeps them.
LEAVES: Final[dict[str, Callable[[str, list[Any]], object]]] = {
    "enter": lambda alias, kept: transaction.atomic(alias).__enter__(),
    "enter without savepoint": lambda alias, kept: transaction.atomic(alias, savepoint=False).__enter__(),
    "generator": lambda alias, kept: [kept.append(_inside_a_block(alias)), next(kept[0])],  # type: ignore[func-returns-value]
}


def _inside_a_block(alias: str) -> Iterator[None]:
    with transaction.atomic(alias):
        yield


@pytest.mark.parametrize(
    ("how", "alias", "fails"),
    [
        *((how, "default", False) for how in LEAVES),
        *(("enter", "other", True), ("enter without savepoint", "default", True), ("generator", "other", False)),
    ],
)
def test_no_later_message_is_inside_a_block_that_a_handler_has_left_open(
    how: str, alias: str, fails: bool, is_watched: bool
) -> None:
    """It would count as handled, and nothing of it would be stored."""
    kept: list[Any] = []

    @subscriber("orders", group="effects", using="default")
    def effect(given: Delivery) -> None:
        Effect.objects.create(number=given.key)
        if given.key == "leaves":
            LEAVES[how](alias, kept)
            if fails:
                raise Refused

    @subscriber("orders", group="elsewhere", using="other")
    def elsewhere(given: Delivery) -> None:
        Effect.objects.using("other").create(number=given.key)

    of_other = next(one for one in registry.subscribers() if one.name.endswith("elsewhere"))
    invoker, first = InboxInvoker(), delivery("leaves")
    [result] = run([first])
    if fails:
        assert isinstance(result, Refused)
    else:
        assert isinstance(result, TransactionUsageError)
        assert "has left an atomic() block open" in str(result)
    assert run([delivery("next")]) == [HANDLED]
    given = [delivery("elsewhere")]
    assert invoker(of_other.subscription, of_other.handler, given, generation=1) == [HANDLED]
    for generator in kept:
        generator.close()
    # Only what is committed stays.
    connections.close_all()
    assert effects() == ["next"]
    assert effects("other") == ["elsewhere"]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_commit_is_not_left_in_a_pipeline() -> None:
    """The message would count as handled before the server has executed COMMIT."""
    kept: list[Any] = []

    @subscriber("orders", group="effects")
    def effect(given: Delivery) -> None:
        Effect.objects.create(number=given.key)
        if given.key == "leaves":
            kept.append(connections["default"].connection.pipeline())
            kept[0].__enter__()

    assert isinstance(run([delivery("leaves")])[0], TransactionUsageError)
    assert run([delivery("next")]) == [HANDLED]
    assert effects() == ["next"]


def test_a_handler_without_inbox_that_leaves_a_block_open_fails() -> None:
    @subscriber("orders", group="effects", idempotent=False)
    def effect(given: Delivery) -> None:
        if given.key == "leaves":
            transaction.atomic().__enter__()
        Effect.objects.create(number=given.key)

    assert isinstance(run([delivery("leaves")])[0], TransactionUsageError)
    assert run([delivery("next")]) == [HANDLED]
    connections.close_all()
    assert effects() == ["next"]


@pytest.mark.parametrize("alias", ["default", "other"])
def test_the_block_around_a_test_stays_open(alias: str) -> None:
    @subscriber("orders", group="effects")
    def effect(given: Delivery) -> None:
        Effect.objects.create(number=given.key)

    connections.close_all()
    assert run([delivery("one")]) == [HANDLED]
    with transaction.atomic(alias):
        assert run([delivery("two")]) == [HANDLED]
        assert connections[alias].in_atomic_block
    assert effects() == ["one", "two"]


# Each keeps the transaction of the next message from beginning, and no watch sees it.
SPOILS: Final[dict[str, Callable[[Any], object]]] = {
    "read-only session": lambda raw: raw.execute("SET default_transaction_read_only = on"),
    "read-only driver": lambda raw: setattr(raw, "read_only", True),
    "search path": lambda raw: raw.execute("SET search_path TO pg_catalog"),
    "role": lambda raw: raw.execute("SET ROLE pg_monitor"),
}


@pytest.mark.parametrize(("how", "where"), [*((how, "inside") for how in SPOILS), ("role", "outside")])
def test_a_session_in_which_no_message_can_begin_is_closed(how: str, where: str) -> None:
    """Otherwise no message of this thread could begin until the process ends."""

    def effect(given: Delivery) -> None:
        Effect.objects.create(number=given.key)
        if given.key == "spoils":
            raw = connections["default"].connection
            transaction.on_commit(lambda: SPOILS[how](raw) and None)

    def slow(given: ClaimedDelivery) -> None:
        with given.finish():
            effect(given)

    subscriber("orders", group="effects", effects=where)(effect if where == "inside" else slow)
    [registered] = registry.subscribers()

    def call(given: Delivery) -> list[Any]:
        return list(HandlerInvoker()(registered.subscription, registered.handler, [given], generation=1))

    assert call(delivery("spoils")) == [HANDLED]
    waits = delivery("waits")
    assert isinstance(call(waits)[0], HandlerNotStarted)
    assert call(waits) == [HANDLED]
    assert effects() == ["spoils", "waits"]


# -- what a handler changes in its delivery, and is called again ------------------------------------


def conflict() -> None:
    """A serialization failure, as PostgreSQL reports it."""
    with connections["default"].cursor() as cursor:
        cursor.execute("DO $$ BEGIN RAISE EXCEPTION 'conflict' USING ERRCODE = '40001'; END $$")


def on_the_broker() -> None:
    publish("orders", {"amount": 10}, key="one", at_once=True)
    consume()


def in_memory() -> None:
    with in_memory_outbox() as outbox:
        publish("orders", {"amount": 10}, key="one", at_once=True)
        # The test's outbox also reports the errors of calls that were repeated.
        outbox.drain(raise_errors=False)


@dataclass
class Paid:
    amount: int


ENGINES: Final = (on_the_broker, in_memory)


@pytest.mark.usefixtures("no_events")
@pytest.mark.skipif(not has("events"), reason="the tree has no typed events")
def test_a_typed_event_is_made_again() -> None:
    from outbox.events import event

    kind = event("account.paid", topic="orders")(Paid)
    for engine in ENGINES:
        calls: list[int] = []

        @subscriber(kind, group="accounts")
        def account(given: Delivery, calls: list[int] = calls) -> None:
            given.body.amount *= 2
            calls.append(given.body.amount)
            if len(calls) < 3:
                conflict()

        engine()
        assert calls == [20, 20, 20]
        registry.unregister_all()


@pytest.mark.usefixtures("no_events")
def test_each_half_of_a_batch_gets_the_published_bodies() -> None:
    for is_in_memory in (False, True):
        calls: list[list[int]] = []

        @subscriber("orders", group="accounts", batch=4, on_error={Refused: "retry_later"})
        def account(given: list[Delivery], calls: list[list[int]] = calls) -> None:
            for one in given:
                one.body["amount"] *= 2
            calls.append([one.body["amount"] for one in given])
            if "poison" in {one.key for one in given}:
                raise Refused

        def place() -> None:
            for key in ("poison", "good"):
                publish("orders", {"amount": 10}, key=key, at_once=True)

        if is_in_memory:
            with in_memory_outbox() as outbox:
                place()
                outbox.drain(raise_errors=False)
        else:
            place()
            consume()
        assert sorted(calls) == [[20], [20], [20, 20]]
        registry.unregister_all()


@pytest.mark.usefixtures("no_events")
def test_a_redelivery_in_a_test_gets_the_published_body() -> None:
    def double(given: Delivery) -> None:
        given.body["amount"] *= 2
        Effect.objects.create(number=f"{given.body['amount']} {_left.get()}")
        _left.set("something")

    subscriber("orders", group="accounts")(double)

    @subscriber("orders", group="charging", effects="outside")
    def charge(given: ClaimedDelivery) -> None:
        with given.finish():
            double(given)

    with in_memory_outbox() as outbox:
        publish("orders", {"amount": 10}, key="one", at_once=True)
        outbox.drain()
        assert [outbox.redeliver(bypass_inbox=True) for _ in range(2)] == [2, 2]
    assert effects() == ["20 "] * 6, "no call meets the variable of another"


@pytest.mark.usefixtures("no_events")
def test_nobody_changes_the_headers_of_a_stored_message() -> None:
    headers = {"kind": "new"}
    seen: list[dict[str, str]] = []

    @subscriber("orders", group="accounts")
    def account(given: Delivery) -> None:
        seen.append(dict(given.headers))
        with pytest.raises(TypeError):
            given.headers["kind"] = "changed"  # type: ignore[index]

    @subscriber("orders", group="others")
    def other(given: Delivery) -> None:
        seen.append(dict(given.headers))

    with in_memory_outbox() as outbox:
        publish("orders", {}, key="one", headers=headers, at_once=True)
        headers["kind"] = "changed"
        outbox.drain()
    publish("orders", {}, key="one", headers={"kind": "new"}, at_once=True)
    consume()
    assert seen == [{"kind": "new"}] * 4


@pytest.mark.usefixtures("no_events")
def test_two_groups_of_a_process_share_no_body() -> None:
    for engine in ENGINES:
        seen: list[int] = []

        def double(given: Delivery, seen: list[int] = seen) -> None:
            given.body["amount"] *= 2
            seen.append(given.body["amount"])

        for group in ("first", "second"):
            subscriber("orders", group=group)(double)
        engine()
        assert seen == [20, 20]
        registry.unregister_all()


@pytest.mark.usefixtures("no_events")
def test_a_masked_field_stays_masked_although_the_handler_removes_it() -> None:
    @subscriber("orders", group="accounts", retry=RetryPolicy(max_attempts=1))
    def account(given: Delivery) -> None:
        raise Refused(given.body.pop("card"))

    with override_settings(OUTBOX={**configured.OUTBOX, "MASKED_FIELDS": {"orders": ["card"]}}):
        publish("orders", {"card": "4111-1111"}, key="one", at_once=True)
        consume()
    with broker_connection() as (connection, _):
        [(error,)] = connection.execute("SELECT error FROM outbox.dead_letter").fetchall()
    assert error.startswith("Refused")
    assert "4111" not in error
