"""What publish leaves out to be light is not missed: options of BEGIN, the guard of a running test, and each change of
the values that it does not read again for every message.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import psycopg
import pytest
from django.conf import settings as django_settings
from django.db import connections, transaction
from django.db.backends.base.base import BaseDatabaseWrapper
from django.test import override_settings
from django.test.utils import CaptureQueriesContext
from psycopg.conninfo import conninfo_to_dict

from outbox.contrib.django import publish
from outbox.contrib.django.database.aliases import alias_conninfo
from outbox.contrib.django.engine.broker import current_engine, reset_broker
from outbox.contrib.django.settings.conf import forced, get_settings
from outbox.errors import ConfigurationError, InvalidMessage
from outbox.topic import MessageType
from tests.django.conftest import _point_alias
from tests.django.state import decisions, postgres_broker, stored

pytestmark = pytest.mark.usefixtures("no_subscribers", "empty_log")


def _shown(setting: str) -> str:
    with connections["default"].cursor() as cursor:
        cursor.execute(f"SHOW {setting}")
        return str(cursor.fetchone()[0])


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


def test_another_encoding_of_the_session_is_noticed(path: str) -> None:
    with transaction.atomic():
        publish("orders", {}, key="é1")
    with connections["default"].cursor() as cursor:
        cursor.execute("SET client_encoding = 'LATIN1'")
    try:
        with transaction.atomic():
            publish("orders", {}, key="é2")
    finally:
        connections["default"].close()
    assert decisions() == {"é1": "C", "é2": "C"}


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
