"""Random programs full of ordinary mistakes, on every path: the rows that they leave agree."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable

import pytest

from tests.mistakes.campaign import Campaign, convictions, report
from tests.mistakes.generator import Side
from tests.mistakes.worlds import WORLDS, World

PROGRAMS, MORE_PROGRAMS = 12, 200
SOAK_VARIABLE = "OUTBOX_MISTAKES"
# More would only repeat themselves in the report.
ENOUGH = 50

each_world = pytest.mark.parametrize("world", WORLDS, ids=str)
each_side = pytest.mark.parametrize("side", ["producer", "consumer", "sharing", "outside"])


@each_side
@each_world
def test_rows_messages_and_effects_agree(world: World, side: Side, campaign_in: Callable[[World], Campaign]) -> None:
    campaign = campaign_in(world)
    found = list(itertools.islice(convictions(campaign, side, range(PROGRAMS)), ENOUGH))
    assert not found, report(campaign, found)


@pytest.mark.slow
@each_side
@each_world
def test_those_of_more_programs_agree(world: World, side: Side, campaign_in: Callable[[World], Campaign]) -> None:
    campaign = campaign_in(world)
    found = list(itertools.islice(convictions(campaign, side, range(PROGRAMS, MORE_PROGRAMS)), ENOUGH))
    assert not found, report(campaign, found)


@pytest.mark.soak
@pytest.mark.timeout(7200)
@each_side
@each_world
def test_a_hundred_thousand_programs(
    world: World, side: Side, campaign_in: Callable[[World], Campaign], capsys: pytest.CaptureFixture[str]
) -> None:
    """A twelfth of OUTBOX_MISTAKES (default 100,000) on each path and side, with seeds of its own."""
    count = int(os.environ.get(SOAK_VARIABLE, "100000")) // 12
    campaign, started = campaign_in(world), time.monotonic()

    def progress(done: int, convicted: int) -> None:
        if done % 1000 == 0 or done == count:
            with capsys.disabled():
                rate = done / (time.monotonic() - started)
                print(f"\n{world} {side}: {done} of {count} programs, {convicted} convicted, {rate:.0f}/s", end="")

    seeds = range(MORE_PROGRAMS, MORE_PROGRAMS + count)
    found = list(itertools.islice(convictions(campaign, side, seeds, progress=progress), ENOUGH))
    assert not found, report(campaign, found)
