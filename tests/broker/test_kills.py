"""SIGKILL at every step of the sequencer and of check-back, again and again, while others publish and consume."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import psycopg
import pytest

from tests.broker.schema.promise import finish, grows
from tests.broker.schema.versions import ROOT, processes

STEPS = {
    "sequence": ("sequencer.before_tick", "sequencer.mid_tick", "sequencer.after_tick"),
    "check": ("check.after_claim", "check.before_report"),
}


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("role", ["sequence", "check"])
def test_killed_at_every_step(role: str, new_database: Callable[..., str], tmp_path: Path) -> None:
    url = new_database()
    with (
        processes(url, tmp_path) as team,
        psycopg.connect(url, autocommit=True) as connection,
    ):
        team.run(ROOT, "setup")
        others = [one for one in ("produce", "consume", "sequence", "check") if one != role]
        team.start(ROOT, *others)
        for visit in (1, 2, 5):
            for step in STEPS[role]:
                team.killed_by(ROOT, role, f"{step}=kill@{visit}")
        team.start(ROOT, role)
        grows(connection, 10)
        finish(team, connection)
