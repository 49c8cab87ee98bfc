"""The oracle works: each part of the promise, when switched off, fails a specimen and random programs."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from django.db import connections

from tests.mistakes.campaign import Campaign, convictions
from tests.mistakes.controls import CONTROLS, Control
from tests.mistakes.oracle import Kind
from tests.mistakes.specimens import specimens
from tests.mistakes.worlds import WORLDS, World

# Far more than it takes: the rarest is found in the first hundred.
SEEDS = range(500)


@pytest.mark.parametrize("world", WORLDS, ids=str)
def test_no_specimen_breaks_a_rule(world: World, campaign_in: Callable[[World], Campaign]) -> None:
    known = specimens(connections[world.alias].vendor)
    verdicts = campaign_in(world).judged(list(known.values()))
    broken = {name: sorted(item.kinds) for name, item in zip(known, verdicts, strict=True) if item.findings}
    assert not broken, "\n\n".join(f"{name}: {kinds}\n{known[name]}" for name, kinds in broken.items())


@pytest.mark.parametrize("control", CONTROLS, ids=str)
def test_a_specimen_finds_each_part_that_is_switched_off(
    control: Control, campaign_in: Callable[[World], Campaign], monkeypatch: pytest.MonkeyPatch
) -> None:
    campaign = campaign_in(control.world)
    control.switch(monkeypatch)
    specimen = specimens(connections[control.world.alias].vendor)[control.specimen]
    assert control.kind in campaign.judged([specimen])[0].kinds, specimen


@pytest.mark.slow
@pytest.mark.parametrize("control", CONTROLS, ids=str)
def test_random_programs_find_each_part_that_is_switched_off(
    control: Control, campaign_in: Callable[[World], Campaign], monkeypatch: pytest.MonkeyPatch
) -> None:
    campaign = campaign_in(control.world)
    control.switch(monkeypatch)
    found = convictions(campaign, control.side, SEEDS, batch=25)
    assert any(control.kind in item.verdict.kinds for item in found)


def test_every_rule_has_a_control() -> None:
    assert {control.kind for control in CONTROLS} == set(Kind)
