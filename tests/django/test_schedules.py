"""Schedules of a project: declarations, early errors, the worker's pass, tests of applications, command, metric."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from io import StringIO
from typing import Any

import pytest
from django.conf import settings
from django.core.management import call_command
from django.core.management.base import CommandError
from django.test.utils import override_settings

from outbox import Delivery, hooks
from outbox.contrib.django import subscriber
from outbox.contrib.django.engine.broker import get_engine
from outbox.contrib.django.operations.comparing import run_compare
from outbox.contrib.django.settings.conf import parse_settings
from outbox.contrib.django.testing import broker_outbox, in_memory_outbox
from outbox.contrib.django.worker.drain import drain
from outbox.contrib.django.worker.periodic import passes
from outbox.contrib.prometheus.serving import state
from outbox.contrib.schedules.declaring import check_schedules, declare_schedules
from outbox.contrib.schedules.publishing import run_once
from outbox.contrib.schedules.schedule import TIME_HEADER, Missed, Schedule, declare, list_schedules
from outbox.contrib.schedules.testing import run_schedule
from outbox.errors import ConfigurationError
from tests.django.broker_world import World, new_world
from tests.django.support import call, call_json

pytestmark = pytest.mark.usefixtures("databases", "no_subscribers")

Change = Callable[..., None]
NIGHTLY: dict[str, Any] = {"cron": "0 3 * * *", "timezone": "Europe/Berlin", "topic": "orders"}
WEEKLY: dict[str, Any] = {"cron": "*/5 * * * *", "topic": "payments", "body": {"days": 7}}


@pytest.fixture
def world(databases: None, outbox_settings: Change) -> Iterator[World]:
    """A healthy broker."""
    with new_world(outbox_settings) as world:
        yield world


@pytest.fixture
def handled(outbox_settings: Change) -> list[Delivery]:
    """The deliveries of a declared schedule."""
    outbox_settings(SCHEDULES={"weekly_report": WEEKLY})
    found: list[Delivery] = []

    @subscriber("payments", group="reports", idempotent=False)
    def weekly_report(delivery: Delivery) -> None:
        found.append(delivery)

    return found


def errors() -> list[str]:
    return [one.msg for one in check_schedules() if one.id == "outbox.E038"]


# -- declaring -------------------------------------------------------------------------------------


def test_a_worker_stores_the_schedules_of_the_settings(world: World, outbox_settings: Change) -> None:
    declared_nightly = {**NIGHTLY, "body": {"all": True}, "missed": "catch_up"}
    outbox_settings(SCHEDULES={"nightly": declared_nightly, "weekly_report": WEEKLY})
    assert errors() == []
    [one] = [one for one in passes() if one.name == "schedules"]
    assert one.run() == {"added": 2, "changed": 0, "removed": 0}
    assert one.run() == {"added": 0, "changed": 0, "removed": 0}
    nightly, weekly = list_schedules(world.run)
    assert (nightly.name, nightly.expression, nightly.timezone, nightly.topic, nightly.missed, nightly.body) == (
        *("nightly", "0 3 * * *", "Europe/Berlin", "orders", Missed.CATCH_UP),
        b'{"all":true}',
    )
    assert (weekly.name, weekly.topic, weekly.timezone, weekly.producer_group) == (
        *("weekly_report", "payments", "UTC"),
        "shop",
    )


def test_the_message_of_a_due_moment_reaches_the_function(world: World, handled: list[Delivery]) -> None:
    """It has no row in the ledger, and neither the comparison nor the audit takes it for lost."""
    declare_schedules()
    at = list_schedules(world.run)[0].next_at
    assert run_once(world.run, get_engine().catalog, now=at).published == 1
    assert drain().handled == 1
    [delivery] = handled
    assert (delivery.body, delivery.headers[TIME_HEADER]) == ({"days": 7}, at.isoformat())
    run_compare()
    assert world.sql("SELECT * FROM outbox.missing_transaction") == []
    call_command("outbox_audit", stdout=StringIO())


def test_schedules_need_a_project_on_the_bundled_broker(outbox_settings: Change) -> None:
    outbox_settings(BROKER="rocketmq://proxy:8081?brokers=broker:10911", SCHEDULES={"nightly": NIGHTLY})
    [text] = errors()
    assert "'nightly'" in text and "Celery beat" in text
    with pytest.raises(ConfigurationError, match=r"'nightly'.*Celery beat"):
        declare_schedules()


# -- early errors ----------------------------------------------------------------------------------


def test_a_wrong_setting_is_named() -> None:
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"cron": "0 25 * * *"}, r"\['nightly'\]\['cron'\].*'0 25 \* \* \*'.*Bad hour"),
        ({"cron": ""}, "text that is not empty"),
        ({"timezone": "Europe/Bonn"}, r"\['timezone'\].*'Europe/Bonn' is unknown"),
        ({"missed": "later"}, "'coalesce', 'catch_up', 'skip'"),
        ({"zone": "UTC"}, "Did you mean 'timezone'|is not an option"),
        ({"topic": None}, "topic"),
    ]
    for given, says in wrong:
        with pytest.raises(ConfigurationError, match=says):
            parse_settings({"SCHEDULES": {"nightly": {**NIGHTLY, **given}}})


def test_a_schedule_that_the_leader_could_not_publish_fails_the_check(outbox_settings: Change) -> None:
    for given, says in (
        ({"topic": "nowhere"}, "the topic 'nowhere', which OUTBOX['TOPICS'] does not declare"),
        ({"topic": "steps"}, "'nightly' cannot be published"),
        ({"body": object()}, "cannot be encoded as application/json"),
    ):
        outbox_settings(SCHEDULES={"nightly": {**NIGHTLY, **given}})
        [text] = errors()
        assert says in text


def test_schedules_without_a_producer_group_fail_the_check() -> None:
    given = {name: value for name, value in settings.OUTBOX.items() if name != "PRODUCER_GROUP"}
    with override_settings(OUTBOX={**given, "SCHEDULES": {"nightly": NIGHTLY}}):
        assert "need OUTBOX['PRODUCER_GROUP']" in errors()[0]


def test_the_setting_without_the_app_is_refused_with_the_name_of_the_app(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hooks, "settings", {})
    with pytest.raises(ConfigurationError, match=r"'SCHEDULES'.*add 'outbox\.contrib\.schedules' to INSTALLED_APPS"):
        parse_settings({"SCHEDULES": {"nightly": NIGHTLY}})


_EARLY = """
from django.conf import settings
settings.configure(
    INSTALLED_APPS=["outbox.contrib.django", "outbox.contrib.schedules"],
    OUTBOX={"SCHEDULES": {"nightly": {"cron": "0 3 * * *", "topic": "orders"}}},
)
from outbox.contrib.django.settings.conf import get_settings, settings_of
get_settings()
from outbox.contrib.schedules.settings import ScheduleSettings
print(list(settings_of(ScheduleSettings).schedules))
"""


def test_the_setting_is_known_before_django_has_loaded_the_apps() -> None:
    """A Celery app that is finalised early reads the settings for its beat entries."""
    done = subprocess.run([sys.executable, "-c", _EARLY], capture_output=True, text=True, check=False)
    assert done.stdout == "['nightly']\n", done.stderr


# -- tests of applications -------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [in_memory_outbox, broker_outbox])
def test_a_test_runs_a_schedule_by_its_name(kind: Any, handled: list[Delivery]) -> None:
    with kind() as outbox:
        message = run_schedule("weekly_report")
        assert outbox.bodies("payments") == [{"days": 7}]
        assert outbox.drain() == 1
        assert [one.message_id for one in handled] == [message.message_id]
        with pytest.raises(ConfigurationError, match="has no nightly; it has weekly_report"):
            run_schedule("nightly")


# -- command and metric ---------------------------------------------------------------------------


def declared(world: World, name: str = "report", **options: Any) -> None:
    one = Schedule(
        producer_group="shop", name=name, topic="orders", expression="0 3 * * *", timezone="Europe/Berlin", **options
    )
    declare(world.run, "shop", [one])


def test_the_command_lists_schedules_with_their_next_due_moments(world: World) -> None:
    declared(world)
    [one] = call_json("outbox_schedule", "list")
    assert (one["name"], len(one["next"]), one["last_at"], one["error"]) == ("report", 5, None, None)
    table = call("outbox_schedule", "list")
    assert "03:00+0" in table and "active" in table
    with pytest.raises(CommandError, match="no schedule 'other' on the broker; its schedules are: report"):
        call_command("outbox_schedule", "pause", "other")


def test_the_metric_says_how_late_a_schedule_is(world: World) -> None:
    declared(world)

    def late() -> Mapping[Any, float]:
        return dict(dict(state().of_parts)["outbox_schedule_late_seconds"])

    assert late() == {("shop", "report"): 0.0}
    world.sql("UPDATE outbox.schedule SET next_at = now() - interval '90 seconds'")
    assert 90 <= late()["shop", "report"] < 600
