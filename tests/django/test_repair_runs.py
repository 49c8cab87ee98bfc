"""A run of `outbox_repair` as a whole: its limits, its audit, and what ends it."""

from __future__ import annotations

from pathlib import Path

import pytest
from django.core.management import call_command
from django.core.management.base import CommandError

from outbox.contrib.django.database.aliases import alias_conninfo
from outbox.contrib.reconciliation.apply import turns
from tests.django.conftest import point_alias
from tests.django.repairs import Repair, finding, lost
from tests.django.shop.models import Order
from tests.django.state import stored

pytestmark = [pytest.mark.usefixtures("databases", "no_subscribers", "no_events"), pytest.mark.timeout(180)]


@pytest.fixture
def repair(tmp_path: Path) -> Repair:
    return Repair(tmp_path)


def test_no_more_than_allowed_and_reports_are_for_people(repair: Repair) -> None:
    for number in ("1", "2", "3"):
        Order.objects.create(number=number)
    report = finding("report", "ORPHAN", "8", why="ORPHAN is only reported.")
    steps = [report, lost("1"), lost("2"), lost("3")]
    assert repair.outcomes(*steps, more=("--most", "2")) == ["reported", "done", "done", "left"]
    assert repair.outcomes(*steps, more=("--most", "2")) == ["reported", "settled", "settled", "done"]
    assert [item.key for item in stored()] == ["1", "2", "3"]


def test_steps_are_spaced_and_unused_slots_are_not_saved_up() -> None:
    now, waited = [100.0], []

    def wait(seconds: float) -> None:
        waited.append(round(seconds, 3))
        now[0] += seconds

    pace = turns(4, clock=lambda: now[0], wait=wait)
    for _ in range(3):
        next(pace)
    assert waited == [0.25, 0.25]
    now[0] += 10
    for _ in range(2):
        next(pace)
    assert waited == [0.25, 0.25, 0.25]


def test_a_broker_that_cannot_be_reached_ends_the_run(repair: Repair) -> None:
    Order.objects.create(number="7")
    reachable = alias_conninfo("broker")
    point_alias("broker", "postgresql://nobody@127.0.0.1:1/nowhere")
    try:
        with pytest.raises(CommandError, match="does not repeat completed steps") as caught:
            repair.run(lost("7"))
    finally:
        point_alias("broker", reachable)
    assert caught.value.returncode == 3
    assert repair.recorded() == []
    assert repair.outcomes(lost("7")) == ["done"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", r"plan\.jsonl is empty, so `outbox-reconcile plan` has failed"),
        ("{", r"plan\.jsonl:1: not a line of a plan"),
        ('{"plan": 1}', "a plan of version 1.*Make the plan again"),
        ('{"plan": 2, "run": "r", "rules": {}}\n{"step": 1}', r"plan\.jsonl:2: not a line"),
    ],
)
def test_what_is_no_plan_is_named_by_its_line(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "plan.jsonl"
    path.write_text(text)
    with pytest.raises(CommandError, match=said) as caught:
        call_command("outbox_repair", str(path))
    assert caught.value.returncode == 2


def test_a_database_without_an_alias_is_an_error(repair: Repair) -> None:
    repair.source["database"] = "app"
    with pytest.raises(CommandError, match="pass --database app=ALIAS") as caught:
        repair.run(lost("7"))
    assert caught.value.returncode == 2
    Order.objects.create(number="7")
    assert repair.outcomes(lost("7"), more=("--database", "app=default")) == ["done"]
    assert len(repair.recorded()) == 1
