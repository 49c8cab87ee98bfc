"""Programs out of seeds: the same seed, side and world give the same program."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Final, Literal

from tests.mistakes.grammar import (
    Atomic,
    Block,
    Close,
    Consumer,
    Decorated,
    Effect,
    Fail,
    FailKind,
    Kill,
    OnCommit,
    Pair,
    Pipeline,
    Producer,
    Program,
    Raise,
    Savepoint,
    SetRollback,
    Sql,
    Step,
    Thread,
    Try,
    Write,
    steps_of,
)

# "sharing": a consumer whose messages share a transaction with others.
Side = Literal["producer", "consumer", "sharing"]

_DEEPEST: Final = 4
_FAILURES: Final[dict[str, tuple[FailKind, ...]]] = {
    "postgresql": (
        *("select", "table", "unique", "raw unique"),
        *("statement timeout", "lock timeout", "nowait", "constraint at commit"),
    ),
    "sqlite": ("table", "unique", "raw unique"),
}
_BY_HAND: Final = {
    "postgresql": (
        *("COMMIT", "ROLLBACK", "BEGIN", "ROLLBACK; BEGIN", "COMMIT; BEGIN"),
        *("ROLLBACK AND CHAIN", "COMMIT AND CHAIN"),
    ),
    "sqlite": ("COMMIT", "ROLLBACK", "BEGIN", "ROLLBACK; BEGIN", "COMMIT; BEGIN"),
}


def generate(seed: int, side: Side, vendor: str) -> Program:
    """The program of a seed."""
    return _Generator(random.Random(f"{seed} {side} {vendor}"), vendor).program(side)


class _Generator:
    def __init__(self, chance: random.Random, vendor: str) -> None:
        self._chance = chance
        self._vendor = vendor
        self._numbers = 0

    def program(self, side: Side) -> Program:
        if side == "sharing":
            return Consumer(attempts=(self._handler(),), place=self._chance.randint(0, 3))
        if side == "consumer":
            count = self._chance.choice([1, 1, 1, 2])
            batch = self._chance.choice([1, 1, 3])
            return Consumer(attempts=tuple(self._handler() for _ in range(count)), batch=batch)
        while True:
            program = Producer(self._request())
            if any(isinstance(step, (Pair, Decorated)) for step in steps_of(program)):
                return program

    def _request(self) -> tuple[Step, ...]:
        """Mostly one unit of work; now and then something before it, so that it meets a used connection."""
        before = [self._mistake(1)] if self._chance.random() < 0.15 else []
        kind = self._chance.random()
        if kind < 0.5:
            main: Step = Atomic(self._body(1))
        elif kind < 0.85:
            main = Decorated(self._body(1), number=self._number(), last=self._chance.random() < 0.4)
        else:
            return (*before, *self._body(1))
        if before or self._chance.random() < 0.3:
            return (*before, Try((main,)), *self._body(2))
        return (main,)

    def _handler(self) -> tuple[Step, ...]:
        """Both parts of the effect stand at the top: what the handler itself takes back is not looked at."""
        body = list(self._body(1))
        places = sorted(self._chance.randint(0, len(body)) for _ in range(2))
        body.insert(places[1], Effect(2))
        body.insert(places[0], Effect(1))
        return tuple(body)

    def _body(self, depth: int) -> tuple[Step, ...]:
        return tuple(self._step(depth) for _ in range(self._chance.choice([1, 2, 2, 3, 3, 4])))

    def _step(self, depth: int) -> Step:
        kind = self._chance.random()
        if kind < 0.32:
            return Pair(self._number(), row_first=self._chance.random() < 0.5, raw=self._chance.random() < 0.4)
        if kind < 0.4:
            return Write(raw=self._chance.random() < 0.5)
        if kind < 0.72 or depth >= _DEEPEST:
            return self._mistake(depth)
        return self._block(depth)

    def _mistake(self, depth: int) -> Step:
        """Often swallowed: what is not ends the program."""
        make: list[Callable[[], Step]] = [
            lambda: Fail(self._chance.choice(_FAILURES[self._vendor])),
            lambda: Sql(self._chance.choice(_BY_HAND[self._vendor]), driver=self._chance.random() < 0.5),
            Raise,
            SetRollback,
            Close,
            Kill if self._vendor == "postgresql" else Close,
        ]
        step = self._chance.choices(make, weights=[50, 40, 12, 5, 4, 4])[0]()
        return Try((step,)) if self._chance.random() < 0.65 else step

    def _block(self, depth: int) -> Step:
        inside = self._body(depth + 1)
        blocks: list[tuple[int, Callable[[], Block]]] = [
            (25, lambda: Try(inside)),
            (20, lambda: Atomic(inside, savepoint=self._chance.random() < 0.8)),
            (15, lambda: Decorated(inside, number=self._number(), last=self._chance.random() < 0.4)),
            (18, lambda: Savepoint(inside, always=self._chance.random() < 0.4)),
            (10, lambda: OnCommit(inside)),
        ]
        if self._vendor == "postgresql":
            blocks += [(12, lambda: Pipeline(inside)), (8, lambda: Thread(inside))]
        else:
            # Another thread that writes would wait for this one's transaction, which waits for the thread.
            blocks.append((8, lambda: Thread((Pair(self._number()),))))
        weights, made = [weight for weight, _ in blocks], [make for _, make in blocks]
        return self._chance.choices(made, weights=weights)[0]()

    def _number(self) -> int:
        self._numbers += 1
        return self._numbers
