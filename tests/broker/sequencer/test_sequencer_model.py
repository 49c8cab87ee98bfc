"""Reading new rows, as a small state machine that is explored exhaustively, with two ways that lose rows.

The model: three transactions that draw an id when they begin to write and later commit or abort, in every
interleaving, with a tick or none after every step. The reader under test takes what `outbox.broker.database.executor`
says it has not seen; the sequencer's statement does the same in SQL (see test_sequencer_concurrency).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import pytest

from outbox.broker.database.executor import Snapshot

FIRST_ID = 100


@dataclass
class World:
    """Transactions by id: running, committed or aborted."""

    states: dict[int, str] = field(default_factory=dict)

    def snapshot(self) -> Snapshot:
        """The rows that a reader which begins now can see."""
        running = tuple(xid for xid, state in sorted(self.states.items()) if state == "running")
        finished = [xid for xid, state in self.states.items() if state != "running"]
        xmax = max(finished, default=FIRST_ID - 1) + 1
        return Snapshot(min((*running, xmax)), xmax, tuple(xid for xid in running if xid < xmax))

    def committed(self) -> list[int]:
        """Ids of committed transactions."""
        return sorted(xid for xid, state in self.states.items() if state == "committed")


class Reader(Protocol):
    """One way to read what is new."""

    def tick(self, world: World) -> list[int]:
        """The transactions that this tick delivers."""


class BySnapshot:
    """Ours; `batch` cuts a backlog at a transaction id."""

    def __init__(self, batch: int = 1000) -> None:
        self._seen = Snapshot(1, 1, ())
        self._batch = batch

    def tick(self, world: World) -> list[int]:
        now = world.snapshot()
        fresh = [xid for xid in world.committed() if now.sees(xid) and not self._seen.sees(xid)]
        above = [xid for xid in fresh if xid >= self._seen.xmax]
        cut = above[self._batch] if len(above) > self._batch else now.xmax
        self._seen = Snapshot(min(now.xmin, cut), cut, tuple(xid for xid in now.in_progress if xid < cut))
        return [xid for xid in fresh if xid < cut]


class ByIdCursor:
    """Broken: reads rows with a greater id than the last one."""

    def __init__(self) -> None:
        self._last = 0

    def tick(self, world: World) -> list[int]:
        fresh = [xid for xid in world.committed() if xid > self._last]
        self._last = max(fresh, default=self._last)
        return fresh


class ByHorizon:
    """Broken: reads rows that are older than every running transaction."""

    def __init__(self) -> None:
        self._last = 0

    def tick(self, world: World) -> list[int]:
        xmin = world.snapshot().xmin
        fresh = [xid for xid in world.committed() if self._last <= xid < xmin]
        self._last = xmin
        return fresh


class WithoutInProgress(BySnapshot):
    """Broken: does not store which transactions were running."""

    def tick(self, world: World) -> list[int]:
        found = super().tick(world)
        self._seen = Snapshot(self._seen.xmax, self._seen.xmax, ())
        return found


def _histories() -> Iterator[tuple[Sequence[tuple[int, str]], Sequence[bool]]]:
    ends = itertools.product(("committed", "aborted"), repeat=3)
    orders = set(itertools.permutations((0, 0, 1, 1, 2, 2)))
    # Another order of beginnings is the same history with other numbers.
    orders = {order for order in orders if tuple(dict.fromkeys(order)) == (0, 1, 2)}
    for order, outcome in itertools.product(sorted(orders), ends):
        begun: set[int] = set()
        steps = []
        for number in order:
            steps.append((number, outcome[number] if number in begun else "running"))
            begun.add(number)
        for ticks in itertools.product((True, False), repeat=5):
            yield steps, (*ticks, True)


def _run(reader: Reader, steps: Sequence[tuple[int, str]], ticks: Sequence[bool]) -> tuple[list[int], bool, World]:
    """The delivered rows, whether a tick ever missed a committed transaction, and the state of the model."""
    world, ids, delivered, late = World(), itertools.count(FIRST_ID), [], False
    xids: dict[int, int] = {}
    for (number, state), tick in zip(steps, ticks, strict=True):
        if number not in xids:
            xids[number] = next(ids)
        world.states[xids[number]] = state
        if tick:
            delivered += reader.tick(world)
            late = late or not set(world.committed()) <= set(delivered)
    for _ in range(3):
        delivered += reader.tick(world)
    return delivered, late, world


def test_model_reading_by_snapshot_delivers_once_and_never_waits() -> None:
    for steps, ticks in _histories():
        delivered, late, world = _run(BySnapshot(), steps, ticks)
        assert sorted(delivered) == world.committed(), (steps, ticks)
        assert not late, (steps, ticks)


def test_model_cut_backlogs_skip_nothing() -> None:
    for steps, ticks in _histories():
        delivered, _, world = _run(BySnapshot(batch=1), steps, ticks)
        assert sorted(delivered) == world.committed(), (steps, ticks)


@pytest.mark.parametrize(("broken", "loses", "stalls"), [
    (ByIdCursor, True, True), (WithoutInProgress, True, True), (ByHorizon, False, True),
])  # fmt: skip
def test_control_the_model_catches(broken: type[Reader], loses: bool, stalls: bool) -> None:
    runs = [_run(broken(), steps, ticks) for steps, ticks in _histories()]
    assert any(sorted(delivered) != world.committed() for delivered, _, world in runs) is loses
    assert any(late for _, late, _ in runs) is stalls
