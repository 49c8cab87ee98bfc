"""Offsets that a call finishes together count like offsets that are finished one by one."""

from __future__ import annotations

import random

import pytest

from outbox.broker.consumer.owned_queue import EntryOutcome, OffsetWindow
from outbox.broker.groups.offsets import Position


@pytest.mark.parametrize("seed", range(20))
def test_finishing_together_counts_like_finishing_one_by_one(seed: int) -> None:
    rng = random.Random(seed)
    together, alone = (OffsetWindow(Position(3, 3)) for _ in range(2))
    for window in (together, alone):
        window.skip(40, 45)
        window.finish(21, EntryOutcome.FILTERED)
    offsets = [offset for offset in range(3, 100) if offset != 21 and not 40 <= offset < 45]
    calls = [offsets[start : start + 7] for start in range(0, len(offsets), 7)]
    # Calls end in any order, but most of them in the order of their offsets.
    calls.sort(key=lambda call: call[0] + rng.choice((0, 0, 0, 30)))
    for call in calls:
        rng.shuffle(call)
        together.finish_all(call, EntryOutcome.HANDLED)
        for offset in call:
            alone.finish(offset, EntryOutcome.HANDLED)
        if rng.random() < 0.5:
            for window in (together, alone):
                window.advance()
            assert together.position() == alone.position()
            assert together.finished_end == alone.finished_end
    for window in (together, alone):
        window.advance()
    assert together.position() == alone.position() == Position(100, 3, handled=91, filtered=1, expired=5)
