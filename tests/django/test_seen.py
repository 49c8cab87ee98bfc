"""No fault is learned of from a customer: each one is made, and status, exit code and probe name it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from html import unescape
from importlib import import_module
from pathlib import Path
from typing import Any, Final

import pytest
from django.contrib.auth.models import User
from django.test import Client

from outbox.broker.operations.conditions import Severity
from outbox.contrib.django.models import OperatorAction
from outbox.contrib.django.operations.known_conditions import catalogue
from outbox.contrib.django.operations.watching import look, probe
from tests.django.broker_world import FAULTS, SEVERITIES, World, new_world
from tests.django.operators import ALL, client_of, make_user
from tests.django.support import ended
from tests.house.alerts import alert_name
from tests.part_apps import has
from tests.prometheus import promtool
from tests.support import eventually

pytestmark = pytest.mark.usefixtures("databases", "no_subscribers")

# Those of the core and of the parts that this tree has.
for path in sorted(Path(__file__).parent.glob("faults*.py")):
    import_module(f"tests.django.{path.stem}")


@pytest.fixture
def world(databases: None, outbox_settings: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    """A healthy broker."""
    # Else a scrape would show what another test saw five seconds ago.
    if has("prometheus"):
        monkeypatch.setattr("outbox.contrib.prometheus.serving._collector", None)
    outbox_settings(STATUS_TOKEN="s3cret")
    with new_world(outbox_settings) as world:
        yield world
    for model in (OperatorAction, User):
        model.objects.all().delete()


def words(page: str) -> str:
    """The text that an operator reads."""
    return " ".join(unescape(re.sub(r"<[^>]*>", " ", page)).replace("`", " ").split())


def samples(text: str) -> dict[str, float]:
    """Series and values of an exposition."""
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    return {series: float(value) for series, _, value in (line.rpartition(" ") for line in lines)}


def test_a_healthy_broker_has_no_condition(world: World) -> None:
    assert look().verdict.conditions == []
    code, text = ended("outbox_status")
    assert (code, text.splitlines()[0]) == (0, "nothing needs attention")
    assert probe().is_healthy


def test_every_condition_has_its_fault() -> None:
    assert set(FAULTS) == set(catalogue())


# Processes have to die for these.
DEATHS = ("crash_loop", "quarantined")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name in DEATHS else ()) for name in sorted(FAULTS)]
)
def test_a_fault_is_named_with_evidence_and_exit_code(world: World, name: str) -> None:
    FAULTS[name](world)
    code, found = stated()
    assert name in found, sorted(found)
    assert found[name]["count"] >= 1 and (found[name]["evidence"] or name == "rejecting")
    assert found[name]["severity"] == SEVERITIES[name]
    assert catalogue()[name].concern.pages or SEVERITIES[name] == "warning"
    assert code == max({"warning": 1, "critical": 2}[one["severity"]] for one in found.values())


def stated() -> tuple[int, dict[str, dict[str, Any]]]:
    """The exit code of the command, and the conditions by name."""
    code, text = ended("outbox_status", "--json")
    said = json.loads(text)
    assert code == {"none": 0, "warning": 1, "critical": 2}[said["severity"]]
    return code, {one["name"]: one for one in said["conditions"]}


# In this order none ends another: of messages, groups, processes, and the application's own tables.
SHOWN: Final[list[str]] = [
    name
    for name in ("dead_letters", "reconciliation_findings", "refused", "process_failing", "parked", "lag", "rejecting")
    if name in FAULTS
]


def test_every_surface_shows_the_same_conditions(world: World) -> None:
    """Command, probe, page, metrics and alerts render what is declared, so a few conditions stand for all."""
    operator = client_of(make_user(*ALL))
    for name in SHOWN:
        FAULTS[name](world)
    code, found = stated()
    assert code == Severity.CRITICAL and set(SHOWN) <= set(found)
    assert {"warning", "critical"} == {one["severity"] for one in found.values()}
    _, text = ended("outbox_status")
    seen = Client().get("/outbox/status/", headers={"Authorization": "Bearer s3cret"})
    assert seen.status_code == 503
    shown = {one["name"]: one for one in seen.json()["conditions"]}
    page = words(operator.get("/outbox/").content.decode()) if has("console") else ""
    scraped = samples(import_module("outbox.contrib.prometheus.serving").render().decode()) if has("prometheus") else {}
    # On a slow machine, other conditions begin or become critical between two of these looks.
    for name in SHOWN:
        one = found[name]
        assert f" {name}: " in text and catalogue()[name].next_step.split("`")[0] in text
        assert (shown[name]["severity"], shown[name]["next_step"]) == (one["severity"], catalogue()[name].next_step)
        if page:
            assert f" {name} " in page
            assert words(catalogue()[name].meaning) in page and words(catalogue()[name].next_step) in page
        if scraped:
            assert scraped[f'outbox_condition{{name="{name}"}}'] == Severity[one["severity"].upper()]


@pytest.mark.skipif(promtool.PROGRAM is None or not has("prometheus"), reason="needs promtool and the alerts")
def test_every_condition_fires_its_alert(tmp_path: Path) -> None:
    """With the series and the value that the test of its fault finds in the metrics, and for no other condition."""
    samples: dict[str, float] = {}
    fired = {}
    for name, kind in catalogue().items():
        severity = SEVERITIES[name]
        samples[f'outbox_condition{{name="{name}"}}'] = int(Severity[severity.upper()])
        said = {"summary": kind.meaning, "description": kind.next_step}
        fired[alert_name(name)] = [{"exp_labels": {"name": name, "severity": severity}, "exp_annotations": said}]
    promtool.fire(tmp_path, samples, fired)
    promtool.fire(tmp_path, dict.fromkeys(samples, 0), {alert: [] for alert in fired})


def holder(name: str) -> dict[str, Any]:
    """The evidence of `lock_held` about a session."""
    [found] = [one for one in look().verdict.conditions if one.name == "lock_held"]
    return next(dict(fact) for fact in found.evidence if fact["application"] == name)


def test_a_row_that_another_session_keeps_locked(world: World) -> None:
    world.limits(LOCK_SECONDS=(0, None))
    world.subscribe()
    session, waiting = world.session("a console"), world.session("outbox-coordinator")
    session.execute("BEGIN")
    session.execute("SELECT FROM outbox.consumer_group FOR UPDATE")
    with ThreadPoolExecutor(1) as pool:
        blocked = pool.submit(waiting.execute, "UPDATE outbox.consumer_group SET paused = true")
        eventually(lambda: "lock_held" in {one.name for one in look().verdict.conditions}, what="the waiting session")
        assert holder("a console")["session"] == f"session {session.info.backend_pid}"
        assert holder("a console")["state"] == "idle in transaction" and holder("a console")["query_start"]
        session.execute("ROLLBACK")
        blocked.result(20)


def test_a_dump_is_named_as_a_dump(world: World) -> None:
    """pg_dump reads in one transaction with one snapshot, and has no transaction id."""
    world.limits(TRANSACTION_SECONDS=(0, None))
    session = world.session("pg_dump")
    session.execute("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
    session.execute("SELECT 1")
    [found] = [one for one in look().verdict.conditions if one.name == "transaction_open"]
    assert [one["application"] for one in found.evidence] == ["pg_dump"]
    assert "If the evidence names a backup (pg_dump), let it end." in found.next_step
