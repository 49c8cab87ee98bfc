"""What an operator sees of claims and steps, when pruning removes them, and what `check` says."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.core.checks import run_checks
from django.db import connections
from django.urls import reverse

from outbox import Delivery, RetryPolicy
from outbox.broker.database.executor import Executor
from outbox.broker.maintenance import retention
from outbox.contrib.django import ClaimedDelivery, publish, run_prune, subscriber
from outbox.contrib.django.database.aliases import broker_connection
from outbox.contrib.django.ledger import pruning
from outbox.contrib.django.models import ClaimEntry, InboxEntry, StepEntry
from outbox.contrib.django.subscribers import registry
from outbox.contrib.django.testing import in_memory_outbox
from outbox.contrib.django.worker.workers import consumer_runtime
from outbox.errors import ConfigurationError
from tests.django.operators import ALL, client_of, make_user
from tests.django.shop.models import Effect
from tests.django.support import call, sequence
from tests.django.urls import Refused
from tests.part_apps import has

pytestmark = pytest.mark.usefixtures("databases", "no_subscribers", "no_rows")

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


def consume() -> None:
    sequence()
    consumer_runtime().run_once()


def forget_old_rows() -> None:
    """As if all rows were older than the inbox is kept, then prune."""
    InboxEntry.objects.update(handled_at=LONG_AGO)
    ClaimEntry.objects.update(expires_at=LONG_AGO)
    StepEntry.objects.update(begun_at=LONG_AGO)
    pruning._sweeps.clear()
    run_prune()


def test_steps_of_a_dead_letter_are_seen_and_kept_and_not_repeated_after_a_replay() -> None:
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
    call("outbox_dead_letter", "replay", "charging", str(receipt.message_id))
    consume()
    assert list(Effect.objects.values_list("number", flat=True)) == ["one"]
    assert len(charging.calls) == 1


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


def test_a_worker_names_the_missing_tables() -> None:
    Charging()
    with connections["default"].cursor() as cursor:
        cursor.execute("ALTER TABLE outbox_step RENAME TO away")
        try:
            with pytest.raises(ConfigurationError, match="'outbox_step' is missing"):
                consumer_runtime()
        finally:
            cursor.execute("ALTER TABLE away RENAME TO outbox_step")


def checks() -> dict[str, Any]:
    return {str(item.id): item for item in run_checks() if str(item.id) in ("outbox.E034", "outbox.I035")}


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


def test_check_names_a_database_without_claims(monkeypatch: pytest.MonkeyPatch) -> None:
    from outbox.contrib.django.operations.checks import _slow_calls
    from outbox.contrib.django.settings.conf import get_settings

    Charging()
    [item] = registry.subscribers()
    with monkeypatch.context() as patch:
        patch.setattr(connections["default"], "vendor", "oracle")
        found = next(iter(_slow_calls(item, get_settings())))
    assert found.id == "outbox.E034" and "oracle" in found.msg
