"""Projects with USE_TZ = False: their naive times are in TIME_ZONE, and pruning by time works."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
from django.test.utils import override_settings

from outbox import Delivery
from outbox.contrib.django import message, run_prune, subscriber
from outbox.contrib.django.models import InboxEntry
from outbox.contrib.django.subscribers.registry import subscribers
from outbox.errors import InvalidSubscription, UsageError
from outbox.utils.ids import uuid7

pytestmark = pytest.mark.usefixtures("empty_log", "no_subscribers")

NOON = datetime(2030, 7, 1, 12)  # noqa: DTZ001
NOON_IN_ZURICH = datetime(2030, 7, 1, 10, tzinfo=UTC)


def effect(given: Delivery) -> None: ...


def test_with_time_zones_a_naive_time_is_refused() -> None:
    with pytest.raises(UsageError, match="time zone"):
        message("reminders", {}, deliver_at=NOON)
    with pytest.raises(InvalidSubscription, match="time zone"):
        subscriber("orders", group="effects", start=NOON)


@override_settings(USE_TZ=False, TIME_ZONE="Europe/Zurich")
def test_without_time_zones_it_is_the_projects() -> None:
    assert message("reminders", {}, deliver_at=NOON).deliver_at == NOON_IN_ZURICH
    assert message("reminders", {}, deliver_at=NOON_IN_ZURICH).deliver_at == NOON_IN_ZURICH
    subscriber("orders", group="effects", start=NOON)(effect)
    assert subscribers()[0].subscription.start == NOON_IN_ZURICH


@override_settings(USE_TZ=False, TIME_ZONE="Pacific/Auckland")
def test_without_time_zones_old_rows_are_pruned_everywhere() -> None:
    for alias in ("default", "lite"):
        InboxEntry.objects.using(alias).create(group="g", generation=1, message_id=uuid7())
    kept = timedelta(days=14)
    assert run_prune(now=datetime.now(UTC) + kept - timedelta(minutes=5)).inbox == 0
    assert run_prune(now=datetime.now(UTC) + kept + timedelta(minutes=5)).inbox == 2
