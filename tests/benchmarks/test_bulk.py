"""The bulk path, small."""

from __future__ import annotations

import pytest

from benchmarks import bulk, goal_list, goal_parts
from benchmarks.bulk import CLAIM, DRAIN, FIFO_ROW, RAW_ROW
from benchmarks.harness import server


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_bulk_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bulk, "MESSAGES", 2000)
    with server() as url:
        found = goal_parts.bulk(url, 0)
    rows = [kind.format(count) for kind in (CLAIM, DRAIN) for count in (1, 2, 4)]
    assert set(found) == {RAW_ROW, FIFO_ROW, *rows}
    assert all(columns[goal_list.RATE] > 0 for columns in found.values())
