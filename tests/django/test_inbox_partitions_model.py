"""Dropping a partition of the inbox, as a small state machine that is explored exhaustively, with four broken variants.

The model: two messages whose ids are in one partition, one group, and one pass. Consumers, retention, time and a
restore of the broker's database act between any two steps of the pass. A message takes effect twice if it is delivered
while its row is gone.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest

MESSAGES = ("a", "b")


@dataclass(frozen=True)
class World:
    """`rows`: the inbox, with True for a row younger than the retention. `step`: how far the pass is."""

    log: frozenset[str] = frozenset(MESSAGES)
    rows: frozenset[tuple[str, bool]] = frozenset()
    effects: tuple[str, ...] = ()
    step: int = 0
    # What the pass has read: ids in the log, and rows in the partition.
    kept: frozenset[str] = frozenset()
    seen: frozenset[str] = frozenset()
    # Rows in the neighbour, which do not go with the partition.
    moved: frozenset[tuple[str, bool]] = frozenset()

    def handled(self) -> frozenset[str]:
        return frozenset(name for name, _ in self.rows | self.moved)


def others(world: World) -> Iterator[World]:
    """What may happen between two steps of the pass."""
    for name in MESSAGES:
        if name in world.log and name not in world.handled():
            # After the drop, the range of the partition belongs to the neighbour.
            effects, row = (*world.effects, name), frozenset({(name, True)})
            if world.step == 3:
                yield replace(world, effects=effects, moved=world.moved | row)
            else:
                yield replace(world, effects=effects, rows=world.rows | row)
        if name in world.log and name in world.effects:
            yield replace(world, log=world.log - {name})
        if name not in world.log and (name, True) in world.rows | world.moved:
            # A backup of the broker is younger than the retention of the inbox.
            yield replace(world, log=world.log | {name})
    # A pass compares all rows with one time, which it takes at its beginning. So no row becomes old during a pass.
    if world.step in (0, 3):
        yield replace(world, rows=_aged(world.rows), moved=_aged(world.moved))


def _aged(rows: frozenset[tuple[str, bool]]) -> frozenset[tuple[str, bool]]:
    return frozenset((name, False) for name, _ in rows)


class Ours:
    """Read the ids in the log; then, in one transaction that handlers wait for, move rows and drop the partition."""

    def steps(self, world: World) -> Iterator[World]:
        if world.step == 0:
            yield replace(world, step=1, kept=world.log, seen=frozenset(name for name, _ in world.rows))
        elif world.step == 1:
            yield self.dropped(replace(world, moved=world.moved | self.stay(world)))
        # From the neighbour, single rows go.
        for name, is_young in world.moved:
            if not is_young and name not in world.log:
                yield replace(world, moved=world.moved - {(name, is_young)})

    def stay(self, world: World) -> frozenset[tuple[str, bool]]:
        return frozenset((name, is_young) for name, is_young in world.rows if is_young or name in world.kept)

    def dropped(self, world: World) -> World:
        return replace(world, step=3, rows=frozenset())


class WithoutTheLog(Ours):
    """Broken: drops by age alone."""

    def stay(self, world: World) -> frozenset[tuple[str, bool]]:
        return frozenset(one for one in world.rows if one[1])


class WithoutYoungRows(Ours):
    """Broken: drops what the log does not have now. A restore of the broker brings messages back."""

    def stay(self, world: World) -> frozenset[tuple[str, bool]]:
        return frozenset(one for one in world.rows if one[0] in world.kept)


class RowsReadBefore(Ours):
    """Broken: moves the rows that were in the partition when the pass read it."""

    def stay(self, world: World) -> frozenset[tuple[str, bool]]:
        return frozenset(one for one in super().stay(world) if one[0] in world.seen)


class WithoutTheLock(Ours):
    """Broken: a handler may write a row between the move and the drop."""

    def steps(self, world: World) -> Iterator[World]:
        if world.step == 2:
            yield self.dropped(world)
        elif world.step == 1:
            yield replace(world, step=2, moved=world.moved | self.stay(world), rows=world.rows - self.stay(world))
        else:
            yield from super().steps(world)


def doubled(way: Ours) -> tuple[int, list[World]]:
    """The number of worlds that the way can reach, and those in which a message took effect twice."""
    found, open_worlds = {World()}, [World()]
    bad = []
    while open_worlds:
        world = open_worlds.pop()
        if len(world.effects) != len(set(world.effects)):
            bad.append(world)
            continue
        for following in (*others(world), *way.steps(world)):
            if following not in found:
                found.add(following)
                open_worlds.append(following)
    return len(found), bad


def test_no_order_of_events_delivers_a_message_whose_row_is_gone() -> None:
    count, bad = doubled(Ours())
    assert bad == []
    assert count > 200


@pytest.mark.parametrize("way", [WithoutTheLog(), WithoutYoungRows(), RowsReadBefore(), WithoutTheLock()])
def test_each_broken_variant_is_found(way: Ours) -> None:
    _, bad = doubled(way)
    assert bad != []
