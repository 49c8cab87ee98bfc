"""How often a handler's transaction goes to its server and back, and that what commits at once commits no less."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from django.db import IntegrityError, connections

from outbox import Delivery
from outbox.contrib.django import subscriber
from outbox.contrib.django.database.aliases import alias_conninfo
from outbox.contrib.django.subscribers import inbox
from outbox.errors import PermanentError
from outbox.ports import Disposition
from tests import pooler
from tests.django.shop.models import Effect
from tests.django.state import effects, execute
from tests.django.test_inbox import delivery, register, run
from tests.round_trips import counted

pytestmark = pytest.mark.usefixtures("application", "no_subscribers")


@pytest.fixture
def round_trips() -> Iterator[Callable[[], int]]:
    """Of the handlers' connection, since the last call."""
    connections["default"].ensure_connection()
    with counted(connections["default"].connection) as count:
        yield count


def test_a_message_costs_two_round_trips_besides_its_handlers_own(round_trips: Callable[[], int]) -> None:
    """BEGIN and the inbox row; the handler's INSERT; the look at the row and COMMIT."""
    register()
    round_trips()
    assert run([delivery("counted")]) == [Disposition.HANDLED]
    assert round_trips() == 3


def test_once_a_second_a_message_costs_a_third(round_trips: Callable[[], int], monkeypatch: pytest.MonkeyPatch) -> None:
    """The look for a later generation, in which a restore of the broker would have lost what the group has handled."""
    register()
    for seconds, expected in ((0.0, 4), (math.inf, 3)):
        monkeypatch.setattr(inbox, "_LOOK_SECONDS", seconds)
        round_trips()
        assert run([delivery(f"{seconds}")], generation=2) == [Disposition.HANDLED]
        assert round_trips() == expected


def test_a_repeated_message_costs_two(round_trips: Callable[[], int]) -> None:
    register()
    once = delivery("once")
    run([once])
    round_trips()
    assert run([once]) == [Disposition.SKIPPED]
    assert round_trips() == 2


def test_a_batch_costs_two_besides_its_handlers_own(round_trips: Callable[[], int]) -> None:
    @subscriber("orders", group="effects", batch=50)
    def effect(deliveries: Sequence[Delivery]) -> None:
        Effect.objects.bulk_create(Effect(number=item.key) for item in deliveries)

    round_trips()
    assert run([delivery(str(number)) for number in range(50)]) == [Disposition.HANDLED] * 50
    assert round_trips() == 3


def test_what_only_commit_refuses_has_failed_and_is_tried_again() -> None:
    """A deferred constraint; the division looks like the error of the check of the row."""
    execute("CREATE TEMP TABLE late (number text UNIQUE DEFERRABLE INITIALLY DEFERRED)")

    @subscriber("orders", group="effects")
    def twice(given: Delivery) -> None:
        Effect.objects.create(number=given.key)
        execute("INSERT INTO late VALUES ('same'), ('same')")

    once = delivery("one")
    for _ in range(2):
        assert isinstance(run([once])[0], IntegrityError)
    assert effects() == []


def test_another_isolation_level_stays_what_it_is() -> None:
    levels: list[str] = []

    @subscriber("orders", group="effects")
    def effect(given: Delivery) -> None:
        levels.append(execute("SHOW transaction_isolation")[0][0])

    raw: Any = connections["default"]
    raw.ensure_connection()
    raw.connection.isolation_level = 3
    try:
        assert run([delivery("one")]) == [Disposition.HANDLED]
    finally:
        raw.close()
    assert levels == ["repeatable read"]


# -- prepared statements ----------------------------------------------------------------------------


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
    return [text for (text,) in execute("SELECT statement FROM pg_prepared_statements WHERE name LIKE 'outbox%'")]


@pytest.mark.usefixtures("new_connection")
def test_what_surrounds_a_handler_is_prepared_once() -> None:
    register()
    handle(4)
    assert sum("INSERT INTO outbox_inbox" in text for text in prepared()) == 1
    assert sum("count(*) FROM outbox_inbox" in text for text in prepared()) == 1


@pytest.mark.usefixtures("new_connection")
def test_plans_do_not_grow_old(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of an inbox with a few rows reads all of it, also once there are a million."""
    monkeypatch.setattr(inbox, "_PLANS_LAST", 3)
    register()
    seen: list[set[Any]] = []
    for _ in range(7):
        handle(1)
        seen.append({name for (name,) in execute("SELECT name FROM pg_prepared_statements WHERE name LIKE 'outbox%'")})
    # The first message of a connection goes unprepared.
    assert [len(names) for names in seen] == [0, 4, 4, 4, 4, 4, 4]
    assert len(set().union(*seen)) == 4 * 3


@pytest.mark.usefixtures("new_connection")
def test_a_handler_may_take_back_what_is_prepared() -> None:
    """The message it does so in fails, in whole; from then on nothing is prepared there."""

    @subscriber("orders", group="effects")
    def effect(given: Delivery) -> None:
        Effect.objects.create(number=given.key)
        if given.key == "careless":
            execute("DEALLOCATE ALL")

    handle(2)
    careless = delivery("careless")
    (failure,) = run([careless])
    assert isinstance(failure, Exception) and not isinstance(failure, PermanentError)
    assert effects() == ["one"] * 2
    assert run([careless]) == run([delivery("one")]) == [Disposition.HANDLED]
    assert prepared() == []


@pytest.mark.usefixtures("new_connection")
def test_what_was_taken_back_between_messages_costs_no_attempt() -> None:
    register()
    handle(2)
    execute("DEALLOCATE ALL")
    handle(2)
    assert prepared() == []


@pytest.mark.usefixtures("new_connection")
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


@pytest.mark.usefixtures("new_connection")
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
