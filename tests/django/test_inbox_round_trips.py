"""How often a handler's transaction goes to its server and back, and that what commits at once commits no less."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
from django.db import IntegrityError, connections

from outbox import Delivery
from outbox.contrib.django import subscriber
from outbox.contrib.django.subscribers import inbox
from outbox.ports import Disposition
from tests.django.shop.models import Effect
from tests.django.test_inbox import delivery, effects, register, run
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
    with connections["default"].cursor() as cursor:
        cursor.execute("CREATE TEMP TABLE late (number text UNIQUE DEFERRABLE INITIALLY DEFERRED)")

    @subscriber("orders", group="effects")
    def twice(given: Delivery) -> None:
        Effect.objects.create(number=given.key)
        with connections["default"].cursor() as cursor:
            cursor.execute("INSERT INTO late VALUES ('same'), ('same')")

    once = delivery("one")
    for _ in range(2):
        assert isinstance(run([once])[0], IntegrityError)
    assert effects() == []


def test_another_isolation_level_stays_what_it_is() -> None:
    levels: list[str] = []

    @subscriber("orders", group="effects")
    def effect(given: Delivery) -> None:
        with connections["default"].cursor() as cursor:
            cursor.execute("SHOW transaction_isolation")
            levels.append(cursor.fetchone()[0])

    raw: Any = connections["default"]
    raw.ensure_connection()
    raw.connection.isolation_level = 3
    try:
        assert run([delivery("one")]) == [Disposition.HANDLED]
    finally:
        raw.close()
    assert levels == ["repeatable read"]
