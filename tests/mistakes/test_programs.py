"""Random programs full of ordinary mistakes, on every path: the rows that they leave agree."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable

import pytest

from tests.mistakes.campaign import Campaign, convictions, report
from tests.mistakes.generator import Side
from tests.mistakes.worlds import WORLDS, World

# On each path and side. OUTBOX_MISTAKES=8000 runs a hundred thousand programs.
PROGRAMS, MORE_PROGRAMS = 12, int(os.environ.get("OUTBOX_MISTAKES", "200"))
# More would only repeat themselves in the report.
ENOUGH = 50

each_world = pytest.mark.parametrize("world", WORLDS, ids=str)
each_side = pytest.mark.parametrize("side", ["producer", "consumer", "sharing", "outside"])


@each_side
@each_world
def test_rows_messages_and_effects_agree(world: World, side: Side, campaign_in: Callable[[World], Campaign]) -> None:
    agree(world, side, campaign_in, range(PROGRAMS))


@pytest.mark.slow
@pytest.mark.timeout(7200)
@each_side
@each_world
def test_those_of_more_programs_agree(world: World, side: Side, campaign_in: Callable[[World], Campaign]) -> None:
    agree(world, side, campaign_in, range(PROGRAMS, MORE_PROGRAMS))


def agree(world: World, side: Side, campaign_in: Callable[[World], Campaign], seeds: range) -> None:
    campaign = campaign_in(world)
    found = list(itertools.islice(convictions(campaign, side, seeds), ENOUGH))
    assert not found, report(found)
