"""The benchmarks of the bulk path and of retention, small."""

from __future__ import annotations

import pytest

from tests.benchmarks.support import number, tables


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_bulk_small() -> None:
    bulk, two = tables("bulk", OUTBOX_BENCH_MESSAGES="2000").values()
    rates = {row["what (median, low to high)"]: number(row["messages/s"]) for row in bulk}
    assert {"drain, one worker that has joined", "drain, two workers that have joined"} <= set(rates)
    assert all(rate > 0 for rate in rates.values())
    measured = rates["drain, two workers that have joined"] / rates["drain, one worker that has joined"]
    assert number(two[0]["ratio to one of the same round"]) == pytest.approx(measured, abs=0.02)


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_retention_small() -> None:
    (rows,) = tables("retention", OUTBOX_BENCH_SIZES="30000").values()
    assert [row["messages in the log"] for row in rows] == ["30,000"]
    assert all(number(cell) > 0 for name, cell in rows[0].items() if name != "messages in the log")
