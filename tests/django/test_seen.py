"""No fault is learned of from a customer: each one is made, and status, exit code and probe name it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from io import StringIO
from typing import Any

import pytest
from django.core.management import call_command

from outbox.broker.operations.conditions import CATALOGUE
from outbox.contrib.django.watching import look, probe
from tests.django.faults import FAULTS, World, new_world

pytestmark = pytest.mark.usefixtures("databases", "no_subscribers")


@pytest.fixture
def world(databases: None, outbox_settings: Callable[..., None]) -> Iterator[World]:
    """A healthy broker."""
    with new_world(outbox_settings) as world:
        yield world


def status(*arguments: str) -> tuple[int, str]:
    """Exit code and output."""
    out = StringIO()
    try:
        call_command("outbox_status", *arguments, stdout=out, no_color=True)
    except SystemExit as ended:
        return int(str(ended.code)), out.getvalue()
    return 0, out.getvalue()


def test_a_healthy_broker_has_no_condition(world: World) -> None:
    assert look().verdict.conditions == []
    code, text = status()
    assert (code, text.splitlines()[0]) == (0, "nothing needs attention")
    assert probe().is_healthy


def test_every_condition_has_its_fault() -> None:
    assert sorted(FAULTS) == sorted(CATALOGUE)


@pytest.mark.parametrize("name", sorted(FAULTS))
def test_a_fault_is_named_with_evidence_and_exit_code(world: World, name: str) -> None:
    assert name not in {condition.name for condition in look().verdict.conditions}
    FAULTS[name](world)
    code, text = status("--json")
    found: dict[str, Any] = {one["name"]: one for one in json.loads(text)["conditions"]}
    assert name in found, sorted(found)
    assert found[name]["count"] >= 1 and (found[name]["evidence"] or name == "rejecting")
    assert code == {"warning": 1, "critical": 2}[json.loads(text)["severity"]] >= 1
    code, text = status()
    assert f" {name}: " in text and CATALOGUE[name].next_step.split("`")[0] in text
