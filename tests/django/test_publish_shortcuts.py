"""What publish leaves out to be light is not missed: options of BEGIN, and the guard of a running test."""

from __future__ import annotations

from typing import Any

import psycopg
import pytest
from django.db import connections, transaction
from django.db.backends.base.base import BaseDatabaseWrapper
from django.test.utils import CaptureQueriesContext

from outbox.contrib.django import publish
from outbox.contrib.django.settings.conf import get_settings
from outbox.errors import ConfigurationError
from tests.django.state import decisions

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


def test_a_block_that_publishes_first_can_be_rolled_back(path: str) -> None:
    def fail() -> None:
        with transaction.atomic():
            publish("orders", {}, key="k")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    with transaction.atomic(), pytest.raises(ZeroDivisionError):
        # Now the block of `fail` is a savepoint.
        fail()
    assert "C" not in decisions().values()


def test_a_statement_of_publish_is_seen_by_a_test_that_counts_statements(path: str) -> None:
    with CaptureQueriesContext(connections["default"]) as seen, transaction.atomic():
        publish("orders", {}, key="k")
    assert any("outbox_ledger" in one["sql"] for one in seen.captured_queries) is (path == "two_phase")


def test_each_guard_of_a_running_test_is_asked(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
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
