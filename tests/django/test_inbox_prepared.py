"""The inbox's statements are prepared where the connection leads straight to its server, and nowhere else."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from django.db import connections

from outbox import Delivery
from outbox.contrib.django import subscriber
from outbox.contrib.django.database.aliases import alias_conninfo
from outbox.contrib.django.subscribers import inbox
from outbox.errors import PermanentError
from outbox.ports import Disposition
from tests import pooler
from tests.django.shop.models import Effect
from tests.django.test_inbox import delivery, effects, register, run

pytestmark = pytest.mark.usefixtures("application", "no_subscribers", "new_connection")


@pytest.fixture
def new_connection() -> Iterator[None]:
    """The prepared statements belong to the connection."""
    connections["default"].close()
    yield
    connections["default"].close()


def handle(count: int) -> None:
    for _ in range(count):
        assert run([delivery("one")]) == [Disposition.HANDLED]


def prepared() -> list[str]:
    with connections["default"].cursor() as cursor:
        cursor.execute("SELECT statement FROM pg_prepared_statements WHERE name LIKE 'outbox%'")
        return [text for (text,) in cursor.fetchall()]


def test_what_surrounds_a_handler_is_prepared_once() -> None:
    register()
    handle(4)
    assert sum("INSERT INTO outbox_inbox" in text for text in prepared()) == 1
    assert sum("count(*) FROM outbox_inbox" in text for text in prepared()) == 1


def test_plans_do_not_grow_old(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of an inbox with a few rows reads all of it, also once there are a million."""
    monkeypatch.setattr(inbox, "_PLANS_LAST", 3)
    register()
    seen: list[set[Any]] = []
    for _ in range(7):
        handle(1)
        with connections["default"].cursor() as cursor:
            cursor.execute("SELECT name FROM pg_prepared_statements WHERE name LIKE 'outbox%'")
            seen.append({name for (name,) in cursor.fetchall()})
    # The first message of a connection goes unprepared.
    assert [len(names) for names in seen] == [0, 4, 4, 4, 4, 4, 4]
    assert len(set().union(*seen)) == 4 * 3


def test_a_handler_may_take_back_what_is_prepared() -> None:
    """The message it does so in fails, in whole; from then on nothing is prepared there."""

    @subscriber("orders", group="effects")
    def effect(given: Delivery) -> None:
        Effect.objects.create(number=given.key)
        if given.key == "careless":
            with connections["default"].cursor() as cursor:
                cursor.execute("DEALLOCATE ALL")

    handle(2)
    careless = delivery("careless")
    (failure,) = run([careless])
    assert isinstance(failure, Exception) and not isinstance(failure, PermanentError)
    assert effects() == ["one"] * 2
    assert run([careless]) == run([delivery("one")]) == [Disposition.HANDLED]
    assert prepared() == []


def test_what_was_taken_back_between_messages_costs_no_attempt() -> None:
    register()
    handle(2)
    with connections["default"].cursor() as cursor:
        cursor.execute("DEALLOCATE ALL")
    handle(2)
    assert prepared() == []


def test_nothing_is_prepared_if_psycopg_prepares_statements(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes back everything that is prepared on a connection whenever a transaction is rolled back."""
    options = connections["default"].settings_dict["OPTIONS"]
    monkeypatch.setitem(options, "server_side_binding", True)
    monkeypatch.setitem(options, "prepare_threshold", 0)
    register()
    handle(3)
    assert prepared() == []
    assert isinstance(run([delivery("poison")])[0], Exception)
    handle(1)


@pytest.mark.skipif(pooler.PROGRAM is None, reason="PgBouncer is not installed")
def test_nothing_is_prepared_behind_a_pooler() -> None:
    """Which lends any of its servers to each transaction."""
    register()
    with (
        tempfile.TemporaryDirectory(prefix="outbox-pool-") as folder,
        pooler.pooled(alias_conninfo("default"), Path(folder), size=2),
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setitem(connections["default"].settings_dict, "HOST", folder)
        patch.setitem(connections["default"].settings_dict, "PORT", "6432")
        handle(4)
        assert prepared() == []
        connections["default"].close()
