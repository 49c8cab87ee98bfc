"""The documents have the stored figures, and the table of goals says what is met."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import goal_list, goal_parts, results, slowed, tables, ticks
from benchmarks.goal_list import Bound, Goal
from benchmarks.peers import ways
from benchmarks.results import Results


@pytest.mark.parametrize("page", tables.pages(), ids=lambda page: page.name)
def test_a_page_has_the_stored_figures(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert text == tables.rendered(text), f"{page} does not match benchmarks/results: run python -m benchmarks.tables"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(results, "FOLDER", tmp_path)
    monkeypatch.delenv(slowed.VARIABLE, raising=False)
    return tmp_path


def test_figures_are_stored_with_their_machine_and_read_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rounds = [{"ours": {"messages/s": value}, "other": {"p50, ms": 2.0}} for value in (30.0, 10.0, 20.0)]
    results.store_rounds("some", rounds[:1], raw_notify=1259.4, n={"transactions": 3000})
    results.store_rounds("some", rounds, raw_notify=1259.4, n={"transactions": 3000})
    monkeypatch.setenv(slowed.VARIABLE, "1")
    results.store_rounds("some", rounds[1:2], raw_notify=600, n={"transactions": 3000})
    fast, slow = results.load("some"), results.load("some", slowed_machine=True)
    assert fast is not None and slow is not None
    assert fast.rows == {"ours": {"messages/s": [30, 10, 20]}, "other": {"p50, ms": [2, 2, 2]}}
    assert (fast.about["rounds"], fast.about["raw_notify_per_second"], fast.about["slowed"]) == (3, 1259, "")
    assert slow.about["slowed"] == slowed.HOW
    assert '"median": 20.0' in (folder / "some.json").read_text()
    shown = tables.script("some")
    assert "| ours | 20.0 (10.0 to 30.0) |  |\n| other |  | 2.00 (2.00 to 2.00) |" in shown
    assert "3,000 transactions; 3 rounds" in shown and "raw NOTIFY 1,259 messages/s" in shown
    assert f"Slowed by {slowed.HOW}" in shown


def test_what_is_not_measured_is_said(folder: Path) -> None:
    assert not list(folder.iterdir())
    assert tables.goals_table().count("| not measured | not measured | not measured |") == len(goal_list.GOALS)
    assert tables.script("some") == ""
    assert all("not measured" in made() for made in tables._OF_SIZING.values())


def test_each_script_has_figures_and_a_place_for_them() -> None:
    placed = {name for page in tables.pages() for name in tables.names(page.read_text(encoding="utf-8"))}
    for name in tables.SCRIPTS:
        assert name in placed
        assert any(tables._of_both_machines(name)), name


def _machine(ours: float, peer: float | None) -> Results:
    rows = {"ours": {"x": [ours, ours, 0.0]}} | ({} if peer is None else {"peer": {"x": [peer, peer, 1.0]}})
    return Results({}, rows, [])


@pytest.mark.parametrize(
    ("fast", "slow", "shown"),
    [
        (_machine(3, 2), _machine(4, 2), ["1.50 (0.00 to 1.50)", "2.00 (0.00 to 2.00)", "yes"]),
        (_machine(3, 2), _machine(2, 2), ["1.50 (0.00 to 1.50)", "1.00 (0.00 to 1.00)", "no"]),
        (_machine(3, 2), None, ["1.50 (0.00 to 1.50)", "not measured", "yes on one"]),
        (_machine(2, 2), None, ["1.00 (0.00 to 1.00)", "not measured", "no"]),
        (_machine(2, None), None, ["not measured", "not measured", "not measured"]),
    ],
)
def test_a_goal_is_met_on_both_machines_or_not(fast: Results, slow: Results | None, shown: list[str]) -> None:
    goal = Goal("what", "web", (Bound(True, 1.5, ("ours", "x"), ("peer", "x")),))
    assert tables.goal_cells(goal, [fast, slow])[1:5] == ["≥ 1.5", *shown]


def test_a_ratio_can_be_compared_with_another_ratio() -> None:
    of_ours, of_raw = ("ours of two", "x"), (("raw of two", "x"), ("raw", "x"))
    bound = Bound(True, 1, of_ours, ("ours", "x"), per=of_raw)
    cells = {"ours": 10.0, "ours of two": 15.0, "raw": 100.0, "raw of two": 120.0}
    assert bound.values({row: {"x": [value]} for row, value in cells.items()}) == [1.25]


def test_a_limit_above_and_a_difference() -> None:
    bound = Bound(False, 6, ("ours", "x"), less=("peer", "x"))
    values = bound.values({"ours": {"x": [60.0]}, "peer": {"x": [52.0]}})
    assert values == [8]
    assert [bound.met(value) for value in (8, 6)] == [False, True]
    assert str(bound) == "≤ 6 MB"


def test_sizing_says_how_fast_the_default_path_is(folder: Path) -> None:
    compared = (ways.ATOMIC_INBOX, ways.TWO_PHASE_INBOX)
    one = {way.name: {"messages/s": 1000.0 - n} for n, way in enumerate(compared)}
    results.store_rounds("goals_web", [one], raw_notify=1, n={})
    shown = " ".join(tables.sizing_throughput().split())
    assert "| two-phase | 999 | 86 million |" in shown and "1,157/s on average and 4,630/s at the peak" in shown


def test_the_rate_of_the_sequencer_is_shown_without_the_other_tables_of_its_script(folder: Path) -> None:
    one = {"title": f"{ticks.SEQUENCED}, from a backlog", "header": ["messages", "messages/s"], "rows": [["FIFO", "9"]]}
    results.store_tables("ticks", [{"title": "One busy tick", "header": ["ms"], "rows": [["1"]]}, one], rounds=0)
    shown = tables.sequencer_rate()
    assert f"{ticks.SEQUENCED}, from a backlog:\n\n| messages | messages/s |\n|---|---|\n| FIFO | 9 |\n" in shown
    assert "One busy tick" not in shown


def test_neighbours_are_pinned_one_to_a_core_and_end(monkeypatch: pytest.MonkeyPatch) -> None:
    with slowed.if_wanted() as none:
        assert none == []
    monkeypatch.setenv(slowed.VARIABLE, "1")
    with slowed.if_wanted() as pids:
        cores = sorted(os.sched_getaffinity(0))
        # Each one pins itself when it starts.
        while [sorted(os.sched_getaffinity(pid)) for pid in pids] != [[core] for core in cores]:
            assert all(Path(f"/proc/{pid}").exists() for pid in pids)
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_the_goals_are_measured_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each goal is measured whose ways can be run here."""
    small = {"TRANSACTIONS": "100", "LATENCY_SECONDS": "1", "PAIRS": "1", "MESSAGES": "2000", "HELD_SECONDS": "2"}
    small["RESULTS"] = str(tmp_path)
    parts = [f"--part={part}" for part in goal_parts.PARTS]
    subprocess.run(
        [sys.executable, "-m", "benchmarks.goals", "--rounds", "1", *parts],
        env=os.environ | {f"OUTBOX_BENCH_{name}": value for name, value in small.items()},
        check=True,
    )
    monkeypatch.setattr(results, "FOLDER", tmp_path)
    left_out = [way.name for way in (ways.RELIABLE, ways.RELIABLE_INBOX) if way.left_out()]
    for goal in goal_list.GOALS:
        found = results.load(f"goals_{goal.part}")
        assert found is not None
        for bound in goal.bounds:
            used = {cell[0] for cell in dataclasses.astuple(bound)[2:] if cell}
            assert bound.values(found.rows) or used & set(left_out), (goal.what, bound)
