"""The benchmarks of the bulk path and of retention, small."""

from __future__ import annotations

import pytest

from benchmarks.bulk import CLAIM, DRAIN
from tests.benchmarks.support import number, tables


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_bulk_small() -> None:
    bulk, more = tables("bulk", OUTBOX_BENCH_MESSAGES="2000").values()
    rates = {row["what (median, low to high)"]: number(row["messages/s"]) for row in bulk}
    rows = {kind: [rates[kind.format(count)] for count in (1, 2, 4)] for kind in (CLAIM, DRAIN)}
    assert all(rate > 0 for rate in rates.values())
    for kind, column in ((DRAIN, "workers"), (CLAIM, "raw claim-delete")):
        expected = [rows[kind][1] / rows[kind][0], rows[kind][2] / rows[kind][0]]
        assert [number(row[column]) for row in more] == pytest.approx(expected, abs=0.02)


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_retention_small() -> None:
    (rows,) = tables("retention", OUTBOX_BENCH_SIZES="30000").values()
    assert [row["messages in the log"] for row in rows] == ["30,000"]
    assert all(number(cell) > 0 for name, cell in rows[0].items() if name != "messages in the log")
