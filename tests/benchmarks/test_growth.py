"""The benchmarks of a growing log and of a transaction held open, small."""

from __future__ import annotations

import pytest

from tests.benchmarks.support import number, tables


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_growth_small() -> None:
    small = {"OUTBOX_BENCH_SIZES": "1000 3000", "OUTBOX_BENCH_TOPICS": "1 5", "OUTBOX_BENCH_MESSAGES": "2000"}
    (rows,) = tables("growth", **small).values()
    assert [(row["messages stored"], row["topics"]) for row in rows] == [("1,000", "1"), ("3,000", "1"), ("1,000", "5")]
    for what in ("bulk messages/s", "CPU us/message in bulk", "CPU us/message singly"):
        assert all(number(row[what]) > 0 for row in rows), what
    for what in ("its ratio", "bulk ratio", "single ratio"):
        assert number(rows[0][what]) == 1, what


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_held_open_small() -> None:
    rows, dead_rows = tables("held_open", OUTBOX_BENCH_HELD_SECONDS="4").values()
    assert [row["transaction"] for row in rows] == ["none", "open for 4 s", "its last quarter"]
    assert number(rows[0]["ratio to none"]) == 1
    assert all(number(row["messages/s"]) > 0 for row in rows[:2])
    assert dead_rows[-1]["table"] == "all"
    assert number(dead_rows[-1]["dead rows"]) > 0
