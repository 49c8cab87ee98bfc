"""The cost of one message in a web process: statements, round trips and bytes of WAL, on both paths."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import psycopg
import pytest
from django.conf import settings as django_settings
from django.db import IntegrityError, connections, transaction
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.transaction import TransactionManagementError
from django.test import override_settings
from django.test.utils import CaptureQueriesContext
from psycopg.conninfo import conninfo_to_dict
from psycopg.errors import UniqueViolation

from outbox.broker.postgres import PostgresBroker
from outbox.contrib.django import get_broker, publish, transactional_message
from outbox.contrib.django.database.aliases import alias_conninfo
from outbox.contrib.django.engine.broker import current_engine, flush, reset_broker
from outbox.contrib.django.ledger import ledger
from outbox.contrib.django.settings.conf import forced, get_settings
from outbox.errors import ConfigurationError, InvalidMessage
from outbox.topic import MessageType
from outbox.utils.ids import uuid7
from tests.django.conftest import _point_alias
from tests.django.shop.models import Order
from tests.django.state import decisions, execute, postgres_broker, stored
from tests.round_trips import counted

pytestmark = pytest.mark.usefixtures("empty_log")


def order(number: str) -> None:
    with transaction.atomic():
        Order.objects.create(number=number)
        publish("orders", {"number": number}, key=number)


@transactional_message("orders", body=lambda number: {"number": number}, key=lambda number: number)
def decorated_order(number: str) -> None:
    Order.objects.create(number=number)


# Of a block with one write: on the application's connection, on the broker's, and those without waiting.
# BEGIN, the write, the message, COMMIT; BEGIN, the write, the ledger row, COMMIT, the look whether it is there.
COSTS = {"atomic": (4, 0, 1), "two_phase": (5, 1, 2)}
# The look whether the message is there is the last statement before COMMIT, on either path.
COSTS_DECORATED = {"atomic": (5, 0, 1), "two_phase": (5, 1, 2)}


@pytest.mark.parametrize(("publishes", "costs"), [(order, COSTS), (decorated_order, COSTS_DECORATED)])
def test_round_trips(path: str, publishes: Callable[[str], None], costs: dict[str, tuple[int, int, int]]) -> None:
    for number in range(2):
        # The connections are there after this, and what can be prepared is.
        publishes(f"warm-up {number}")
    broker = get_broker()
    assert isinstance(broker, PostgresBroker)
    assert flush(within_seconds=30)
    with contextlib.ExitStack() as stack:
        application, one_way, *halves = (
            stack.enter_context(counted(one))
            for one in (connections["default"].connection, broker._one_way._pgconn, *broker._pool._idle)
        )
        publishes("counted")
        assert flush(within_seconds=30)
        assert (application(), sum(one() for one in halves), one_way()) == costs[path]


@pytest.mark.parametrize("path", ["atomic"], indirect=True)
@pytest.mark.parametrize(("threshold", "prepared"), [(None, 0), (5, 1)])
def test_the_call_is_prepared_if_the_alias_allows_it(path: str, threshold: int | None, prepared: int) -> None:
    connections["default"].ensure_connection()
    session = connections["default"].connection
    before, session.prepare_threshold = session.prepare_threshold, threshold
    try:
        order("first")
        order("second")
        statements = session.execute("SELECT statement FROM pg_prepared_statements", prepare=False).fetchall()
    finally:
        session.prepare_threshold = before
        session.execute("DEALLOCATE ALL")
    assert sum("append_one" in statement for [statement] in statements) == prepared


def test_no_thread_of_ours_runs_in_a_process_that_publishes(path: str) -> None:
    before = set(threading.enumerate())
    order("first")
    order("second")
    assert flush(within_seconds=30)
    assert set(threading.enumerate()) == before


def test_bytes_of_wal(path: str) -> None:
    """The write of the block and all commits included."""
    written = []
    for number in range(30):
        before = _wal_position()
        order(f"order {number:03}")
        assert flush(within_seconds=30)
        written.append(_wal_position() - before)
    # Writes of other sessions, and an index page that splits, come in addition.
    assert min(written) <= {"atomic": 1_100, "two_phase": 1_500}[path]


def _wal_position() -> int:
    return int(execute("SELECT pg_current_wal_insert_lsn() - '0/0'::pg_lsn")[0][0])


@pytest.mark.parametrize("before_publish", ["DEALLOCATE ALL", "DISCARD PLANS"])
def test_a_block_may_discard_its_sessions_statements(path: str, before_publish: str) -> None:
    """Nothing of the package is prepared on the application's connection, so no statement can be missing there."""
    for number in range(3):
        with transaction.atomic():
            Order.objects.create(number=f"{number}")
            connections["default"].connection.execute(before_publish)
            publish("orders", {}, key=f"{number}")
            connections["default"].connection.execute(before_publish)
    assert flush(within_seconds=30)
    assert Order.objects.count() == 3


@pytest.mark.parametrize("path", ["two_phase"], indirect=True)
def test_wrappers_of_the_application_see_the_statements_of_the_ledger(path: str) -> None:
    seen: list[str] = []

    def wrapper(execute: Callable[..., Any], sql: str, params: Any, many: bool, context: dict[str, Any]) -> Any:
        assert context["cursor"] is not None
        seen.append(sql)
        return execute(sql, params, many, context)

    with connections["default"].execute_wrapper(wrapper):
        order("first")
    assert sum("outbox_ledger" in sql for sql in seen) == 2
    seen.clear()
    order("second")
    assert seen == []


@pytest.mark.parametrize("path", ["two_phase"], indirect=True)
def test_an_error_of_a_ledger_statement_is_djangos(path: str) -> None:
    connection = connections["default"]
    item = uuid7()
    with transaction.atomic():
        ledger.insert_committed(connection, item)
    with pytest.raises(IntegrityError) as caught, transaction.atomic():
        ledger.insert_committed(connection, item)
    assert isinstance(caught.value.__cause__, UniqueViolation)
    assert ledger.committed(connection, [item, uuid7()]) == {item}
    assert ledger.committed(connection, []) == set()
    with transaction.atomic():
        transaction.set_rollback(True)
        with pytest.raises(TransactionManagementError):
            ledger.committed(connection, [item])


# -- what publish leaves out to be light is not missed ----------------------------------------------


def _shown(setting: str) -> str:
    return str(execute(f"SHOW {setting}")[0][0])


def test_a_block_that_publishes_first_begins_as_its_connection_says(path: str) -> None:
    connections["default"].ensure_connection()
    raw = connections["default"].connection
    for level, shown in ((None, "read committed"), (psycopg.IsolationLevel.SERIALIZABLE, "serializable")):
        raw.isolation_level = level
        try:
            with transaction.atomic():
                publish("orders", {}, key=shown)
                assert _shown("transaction_isolation") == shown
        finally:
            raw.isolation_level = None
    assert decisions() == {"read committed": "C", "serializable": "C"}


def test_a_statement_of_publish_is_seen_by_a_test_that_counts_statements(path: str) -> None:
    with CaptureQueriesContext(connections["default"]) as seen, transaction.atomic():
        publish("orders", {}, key="k")
    assert any("outbox_ledger" in one["sql"] for one in seen.captured_queries) is (path == "two_phase")


def test_each_guard_of_a_running_test_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    with transaction.atomic():
        publish("orders", {}, key="k")
    real, broker = BaseDatabaseWrapper.ensure_connection, get_settings().broker

    def guard(connection: BaseDatabaseWrapper, *args: Any) -> None:
        if connection.connection is None and connection.alias == broker:
            raise RuntimeError("this test may not use it")
        real(connection)

    for _ in range(2):
        with monkeypatch.context() as patch:
            patch.setattr(BaseDatabaseWrapper, "ensure_connection", guard)
            with transaction.atomic(), pytest.raises(ConfigurationError, match="this test may not use it"):
                publish("orders", {}, key="k")
        with transaction.atomic():
            publish("orders", {}, key="k")


@contextmanager
def of_broker(**values: Any) -> Iterator[None]:
    """Other values of the broker's alias, as a test runner sets them."""
    entry = connections.settings[get_settings().broker]
    before = dict(entry)
    entry.update(values)
    try:
        yield
    finally:
        entry.update(before)


CHANGES: dict[str, Callable[[], Any]] = {
    "settings": lambda: override_settings(OUTBOX={**django_settings.OUTBOX}),
    "no settings": lambda: override_settings(OUTBOX=None),
    "keys of test helpers": lambda: forced({"IN_MEMORY": True}),
    "NAME": lambda: of_broker(NAME="other"),
    "HOST": lambda: of_broker(HOST="other"),
    "PORT": lambda: of_broker(PORT="1"),
    "USER": lambda: of_broker(USER="other"),
    "PASSWORD": lambda: of_broker(PASSWORD="other"),
    "role": lambda: of_broker(OPTIONS={"assume_role": "other"}),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_of_what_the_engine_was_made_for_is_noticed_by_the_next_call(change: str) -> None:
    """No session is opened here. An engine that would be kept publishes to the former database."""
    reset_broker()
    before = current_engine()
    assert current_engine() is before
    try:
        with CHANGES[change]():
            changed = current_engine()
            assert changed is not before and changed.settings is get_settings()
            assert current_engine() is changed
        assert current_engine() not in (before, changed)
    finally:
        reset_broker()


@override_settings()
def test_settings_that_appear_later_are_noticed() -> None:
    outbox = django_settings.OUTBOX
    del django_settings.OUTBOX
    reset_broker()
    without = current_engine()
    assert current_engine() is without
    django_settings.OUTBOX = outbox
    assert current_engine().settings.topics and not without.settings.topics
    reset_broker()


def test_a_topic_that_was_changed_is_noticed_when_the_topics_are_read_again(path: str) -> None:
    with transaction.atomic():
        publish("payments", {})
    broker = postgres_broker()
    before = broker.topic("payments")
    broker.declare([replace(before, types=frozenset({MessageType.FIFO, MessageType.TRANSACTION}))])
    try:
        current_engine().catalog._stale_at = 0.0
        with transaction.atomic(), pytest.raises(InvalidMessage, match="needs a key"):
            publish("payments", {})
    finally:
        broker.declare([before])


def test_another_connection_of_the_driver_is_noticed(path: str) -> None:
    """What is known about a session ends with it: the watch of its blocks, and whether it has begun a transaction."""
    for key in ("first", "second"):
        connections["default"].close()
        with transaction.atomic():
            publish("orders", {}, key=key)
    assert decisions() == {"first": "C", "second": "C"}


def test_two_aliases_that_differ_only_in_their_service_have_paths_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The entries of DATABASES have no other value; the first publish call proves the path of its alias only."""
    aliases = ("default", "broker")
    services = [
        "\n".join(
            [f"[{alias}]", *(f"{name}={value}" for name, value in conninfo_to_dict(alias_conninfo(alias)).items())]
        )
        for alias in aliases
    ]
    (tmp_path / "services").write_text("\n".join(services))
    monkeypatch.setenv("PGSERVICEFILE", str(tmp_path / "services"))
    nothing = dict.fromkeys(("NAME", "HOST", "PORT", "USER", "PASSWORD"), "")
    before = {alias: dict(connections.settings[alias]) for alias in aliases}
    try:
        for alias in aliases:
            _point_alias(alias, {**nothing, "OPTIONS": {"service": alias}})
        for alias in reversed(aliases):
            with transaction.atomic(using=alias):
                publish("orders", {}, key=alias, using=alias)
        assert {one.key: one.half for one in stored()} == {"broker": False, "default": True}
    finally:
        reset_broker()
        for alias, entry in before.items():
            _point_alias(alias, entry)
