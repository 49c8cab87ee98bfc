"""The goals of speed and memory. `benchmarks.goals` measures them, `benchmarks.tables` prints them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from benchmarks.bulk import CLAIM, DRAIN, RAW_ROW
from benchmarks.peers.ways import (
    ATOMIC,
    ATOMIC_INBOX,
    FLOOR,
    FLOOR_TWO_PHASE,
    RAW,
    RELIABLE,
    RELIABLE_INBOX,
    TWO_PHASE,
    TWO_PHASE_INBOX,
)

# Columns of the part "web". CPU and WAL are per message of the job of four threads, unless the column names 300/s.
RATE = "messages/s"
P50, P99 = "p50, ms", "p99, ms"
WEB_CPU = "CPU of web process and sessions, µs"
BEHIND_CPU, STEADY_CPU = "CPU behind, µs", "CPU behind at 300/s, µs"
WAL = "WAL bytes"
PLAIN_BLOCK, BLOCK, BLOCK_RATIO = "plain block, µs", "publishing block, µs", "ratio of the blocks"
# Column of the part "memory", and rows: a worker with all its processes, and a web process.
MEMORY = "RSS, MB"
WORKER, WEB, NO_OUTBOX = "worker, {}", "web process, {}", "web process without outbox"
KINDS = ("inbox", "no inbox")

# A row and a column.
Cell = tuple[str, str]
Rows = Mapping[str, Mapping[str, Sequence[float]]]


@dataclass(frozen=True)
class Bound:
    """A limit for a cell, for its ratio to the cell `over`, or for what it has more than the cell `less`."""

    at_least: bool
    limit: float
    cell: Cell
    over: Cell | None = None
    less: Cell | None = None

    def values(self, rows: Rows) -> list[float] | None:
        """The values of all rounds; None if a cell was not measured."""
        try:
            value, over, less = (rows[cell[0]][cell[1]] if cell else None for cell in (self.cell, self.over, self.less))
        except KeyError:
            return None
        assert value is not None
        if over:
            return [a / b for a, b in zip(value, over, strict=True)]
        return [a - b for a, b in zip(value, less, strict=True)] if less else list(value)

    def met(self, median: float) -> bool:
        return median >= self.limit if self.at_least else median <= self.limit

    def __str__(self) -> str:
        return f"{'≥' if self.at_least else '≤'} {self.limit:g}{' MB' if self.less else ''}"


@dataclass(frozen=True)
class Goal:
    """One row of the table of goals; `part` of `python -m benchmarks.goals` measures it.

    `least` has the same ratios of a program that does less work: for the web job, the least work of an outbox in Django
    (benchmarks/peers/floor); for draining, raw claim-delete. Its limits are not judged. If even that program misses the
    limit, no outbox can reach it on this machine.
    """

    what: str
    part: str
    bounds: tuple[Bound, ...]
    least: tuple[Bound, ...] = ()


def _least(limit: float, row: str, over: str, column: str = RATE) -> Bound:
    return Bound(True, limit, (row, column), (over, column))


def _most(limit: float, row: str, over: str, column: str) -> Bound:
    return Bound(False, limit, (row, column), (over, column))


_ATOMIC, _TWO_PHASE, _PEER = ATOMIC_INBOX.name, TWO_PHASE_INBOX.name, RELIABLE_INBOX.name
_FLOOR, _FLOOR_TWO = FLOOR.name, FLOOR_TWO_PHASE.name
GOALS = (
    Goal(
        "web job, default settings (inbox, one model write in the handler), messages/s against the peer with its "
        "inbox: atomic; two-phase",
        "web",
        (_least(1.5, _ATOMIC, _PEER), _least(1.2, _TWO_PHASE, _PEER)),
        (_least(1.5, _FLOOR, _PEER), _least(1.2, _FLOOR_TWO, _PEER)),
    ),
    Goal(
        "web job without inbox, messages/s against the peer: atomic; two-phase",
        "web",
        (_least(1.4, ATOMIC.name, RELIABLE.name), _least(1.1, TWO_PHASE.name, RELIABLE.name)),
    ),
    Goal(
        "time of a publishing block against the plain block, one thread: atomic; two-phase",
        "web",
        (Bound(False, 1.6, (_ATOMIC, BLOCK_RATIO)), Bound(False, 2.5, (_TWO_PHASE, BLOCK_RATIO))),
        (Bound(False, 1.6, (_FLOOR, BLOCK_RATIO)), Bound(False, 2.5, (_FLOOR_TWO, BLOCK_RATIO))),
    ),
    Goal(
        "CPU of the web process and its sessions per message, against the peer's with its inbox: atomic; two-phase",
        "web",
        (_most(0.85, _ATOMIC, _PEER, WEB_CPU), _most(1.2, _TWO_PHASE, _PEER, WEB_CPU)),
        (_most(0.85, _FLOOR, _PEER, WEB_CPU), _most(1.2, _FLOOR_TWO, _PEER, WEB_CPU)),
    ),
    Goal(
        "commit → handler at 300/s from four threads, p50 against raw NOTIFY's: atomic; two-phase",
        "web",
        (_most(2.5, _ATOMIC, RAW.name, P50), _most(3.5, _TWO_PHASE, RAW.name, P50)),
        (_most(2.5, _FLOOR, RAW.name, P50), _most(3.5, _FLOOR_TWO, RAW.name, P50)),
    ),
    Goal(
        "CPU behind the web process per message, atomic, against the peer's: without inbox; with inbox",
        "web",
        (_most(0.5, ATOMIC.name, RELIABLE.name, BEHIND_CPU), _most(0.7, _ATOMIC, _PEER, BEHIND_CPU)),
    ),
    Goal(
        "draining by one worker, messages/s against one process of raw psycopg that inserts and claims the messages; "
        "against one that only claims them",
        "bulk",
        (_least(1.0, DRAIN.format(1), RAW_ROW), _least(1.0, DRAIN.format(1), CLAIM.format(1))),
    ),
    Goal(
        "draining by two workers against one; by four against two",
        "bulk",
        (_least(1.7, DRAIN.format(2), DRAIN.format(1)), _least(1.0, DRAIN.format(4), DRAIN.format(2))),
        (_least(1.7, CLAIM.format(2), CLAIM.format(1)), _least(1.0, CLAIM.format(4), CLAIM.format(2))),
    ),
    Goal(
        "RSS that outbox and one publish add to a web process: inbox; no inbox",
        "memory",
        tuple(Bound(False, 6, (WEB.format(kind), MEMORY), less=(NO_OUTBOX, MEMORY)) for kind in KINDS),
    ),
)
