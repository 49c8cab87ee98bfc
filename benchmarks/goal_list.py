"""The goals of speed and memory. `benchmarks.goals` measures them, `benchmarks.tables` prints them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from benchmarks.bulk import CLAIM, DRAIN
from benchmarks.peers.ways import (
    ATOMIC,
    ATOMIC_INBOX,
    FLOOR,
    FLOOR_LOG,
    FLOOR_LOG_TWO_PHASE,
    FLOOR_TWO_PHASE,
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
PLAIN_BLOCK, BLOCK, ADDED = "plain block, µs", "publishing block, µs", "publish adds, µs"
# Columns of the part "age", at 300/s from four threads: the last seconds before another transaction held a snapshot,
# and the last minute while it did. The dead rows are those of all tables per 100 messages meanwhile.
P99_BEFORE, P99_HELD = "p99 before, ms", "p99 while a snapshot is held, ms"
HELD_SHARE, DEAD_ROWS = "share handled while a snapshot is held", "dead rows per 100 messages"
# Column of the part "memory", and rows: a worker with all its processes, and a web process.
MEMORY = "RSS, MB"
WORKER, WEB, NO_OUTBOX = "worker, {}", "web process, {}", "web process without outbox"
KINDS = ("inbox", "no inbox")

# A row and a column.
Cell = tuple[str, str]
Rows = Mapping[str, Mapping[str, Sequence[float]]]


@dataclass(frozen=True)
class Bound:
    """A limit for a cell's ratio to the cell `over`, or for what it has more than the cell `less`.

    With `per`, two cells that are divided, the ratio itself is compared with theirs.
    """

    at_least: bool
    limit: float
    cell: Cell
    over: Cell | None = None
    less: Cell | None = None
    per: tuple[Cell, Cell] | None = None

    def values(self, rows: Rows) -> list[float] | None:
        """The values of all rounds; None if a cell was not measured."""

        def rounds(cell: Cell) -> Sequence[float]:
            return rows[cell[0]][cell[1]]

        try:
            found = list(rounds(self.cell))
            if self.over:
                found = [a / b for a, b in zip(found, rounds(self.over), strict=True)]
            if self.less:
                found = [a - b for a, b in zip(found, rounds(self.less), strict=True)]
            if self.per:
                found = [a * c / b for a, b, c in zip(found, *map(rounds, self.per), strict=True)]
        except KeyError:
            return None
        return found

    def met(self, median: float) -> bool:
        return median >= self.limit if self.at_least else median <= self.limit

    def __str__(self) -> str:
        return f"{'≥' if self.at_least else '≤'} {self.limit:g}{' MB' if self.less else ''}"


@dataclass(frozen=True)
class Goal:
    """One row of the table of goals; `part` of `python -m benchmarks.goals` measures it."""

    what: str
    part: str
    bounds: tuple[Bound, ...]


def _least(limit: float, row: str, over: str, column: str = RATE) -> Bound:
    return Bound(True, limit, (row, column), (over, column))


def _most(limit: float, row: str, over: str, column: str) -> Bound:
    return Bound(False, limit, (row, column), (over, column))


_ATOMIC, _TWO_PHASE, _PEER = ATOMIC_INBOX.name, TWO_PHASE_INBOX.name, RELIABLE_INBOX.name
_FLOOR, _FLOOR_TWO, _LOG, _LOG_TWO = FLOOR.name, FLOOR_TWO_PHASE.name, FLOOR_LOG.name, FLOOR_LOG_TWO_PHASE.name
GOALS = (
    Goal(
        "web job, messages/s against the least log: atomic; two-phase",
        "web",
        (_least(0.85, _ATOMIC, _LOG), _least(0.85, _TWO_PHASE, _LOG_TWO)),
    ),
    Goal(
        "web job, messages/s against the peer with its inbox: atomic; two-phase",
        "web",
        (_least(1.9, _ATOMIC, _PEER), _least(1.5, _TWO_PHASE, _PEER)),
    ),
    Goal(
        "web job without inbox, messages/s against the peer without inbox: atomic; two-phase",
        "web",
        (_least(1.5, ATOMIC.name, RELIABLE.name), _least(1.2, TWO_PHASE.name, RELIABLE.name)),
    ),
    Goal(
        "CPU of the web process and its sessions per message, against the least work: atomic; two-phase",
        "web",
        (_most(1.3, _ATOMIC, _FLOOR, WEB_CPU), _most(1.3, _TWO_PHASE, _FLOOR_TWO, WEB_CPU)),
    ),
    Goal(
        "CPU behind the web process per message at full speed, against the least log: atomic; two-phase",
        "web",
        (_most(1.3, _ATOMIC, _LOG, BEHIND_CPU), _most(1.3, _TWO_PHASE, _LOG_TWO, BEHIND_CPU)),
    ),
    Goal(
        "the same at 300/s",
        "web",
        (_most(1.3, _ATOMIC, _LOG, STEADY_CPU), _most(1.3, _TWO_PHASE, _LOG_TWO, STEADY_CPU)),
    ),
    Goal(
        "COMMIT to handler at 300/s from four threads, p50 against the least log's: atomic; two-phase",
        "web",
        (_most(1.3, _ATOMIC, _LOG, P50), _most(1.3, _TWO_PHASE, _LOG_TWO, P50)),
    ),
    Goal(
        "the same, p99: atomic; two-phase",
        "web",
        (_most(1.6, _ATOMIC, _LOG, P99), _most(1.6, _TWO_PHASE, _LOG_TWO, P99)),
    ),
    Goal(
        "what a publishing block adds to the plain block (worker stopped), against what the least work adds: atomic; "
        "two-phase",
        "web",
        (_most(1.5, _ATOMIC, _FLOOR, ADDED), _most(1.3, _TWO_PHASE, _FLOOR_TWO, ADDED)),
    ),
    Goal(
        "WAL bytes per message against the least log: atomic; two-phase",
        "web",
        (_most(1.2, _ATOMIC, _LOG, WAL), _most(1.2, _TWO_PHASE, _LOG_TWO, WAL)),
    ),
    Goal(
        "draining by one worker, messages/s against one process that only claims and deletes messages",
        "bulk",
        (_least(1.0, DRAIN.format(1), CLAIM.format(1)),),
    ),
    Goal(
        "draining by two workers against one, as a share of what two such processes reach against one",
        "bulk",
        (
            Bound(
                True,
                1.0,
                (DRAIN.format(2), RATE),
                (DRAIN.format(1), RATE),
                per=((CLAIM.format(2), RATE), (CLAIM.format(1), RATE)),
            ),
        ),
    ),
    Goal(
        "a REPEATABLE READ snapshot held elsewhere, at 300/s: rate against the rate of publishing: atomic; two-phase",
        "age",
        tuple(Bound(True, 0.98, (way, HELD_SHARE)) for way in (_ATOMIC, _TWO_PHASE)),
    ),
    Goal(
        "the same, p99 of the last minute against before: atomic; two-phase",
        "age",
        tuple(Bound(False, 1.3, (way, P99_HELD), (way, P99_BEFORE)) for way in (_ATOMIC, _TWO_PHASE)),
    ),
    Goal(
        "the same, dead rows in all tables per 100 messages: atomic; two-phase",
        "age",
        tuple(Bound(False, 5, (way, DEAD_ROWS)) for way in (_ATOMIC, _TWO_PHASE)),
    ),
    Goal(
        "RSS that outbox and one publish add to a web process: inbox; no inbox",
        "memory",
        tuple(Bound(False, 6, (WEB.format(kind), MEMORY), less=(NO_OUTBOX, MEMORY)) for kind in KINDS),
    ),
)
