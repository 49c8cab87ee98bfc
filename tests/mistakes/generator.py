"""Programs out of seeds: the same seed, side and world give the same program."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Final, Literal

from tests.mistakes.grammar import (
    HELD,
    Atomic,
    Block,
    Close,
    Consumer,
    Decorated,
    Effect,
    Fail,
    FailKind,
    Finish,
    Kill,
    Leave,
    LeaveKind,
    Many,
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
    StepCall,
    Thread,
    Try,
    Write,
    steps_of,
)
from tests.mistakes.values import HOSTILE

# "sharing": a consumer whose messages share a transaction with others. "outside": one with effects="outside".
Side = Literal["producer", "consumer", "sharing", "outside"]

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
    name = f"{seed} {side} {vendor}"
    chance, keys, texts = (random.Random(name + of) for of in ("", " unique", " texts"))
    program = _hostile(_Generator(chance, keys, texts, vendor).program(side), random.Random(f"{name} hostile"))
    return program if isinstance(program, Producer) else _leaving(program, random.Random(f"{name} left"))


def _hostile(program: Program, chance: random.Random) -> Program:
    """Some of its messages have a hostile value. Separate chances, for the same reason as those of unique keys."""

    def changed(body: tuple[Step, ...]) -> tuple[Step, ...]:
        return tuple(
            replace(step, body=changed(step.body))
            if isinstance(step, Block)
            else replace(step, hostile=chance.choice(list(HOSTILE)))
            if isinstance(step, Pair) and chance.random() < 0.2
            else step
            for step in body
        )

    if isinstance(program, Producer):
        return replace(program, body=changed(program.body))
    return replace(program, attempts=tuple(map(changed, program.attempts)))


_LEFT: Final[tuple[LeaveKind, ...]] = ("body", "language", "time zone", "variable", "session")


def _leaving(program: Consumer, chance: random.Random) -> Consumer:
    """The handler also leaves something behind in some attempts, and may then meet a conflict.

    Separate chances, for the same reason as those of unique keys.
    """
    attempts = []
    for attempt in program.attempts:
        body = list(attempt)
        if chance.random() < 0.4:
            body.insert(chance.randint(0, len(body)), Leave(chance.choice(_LEFT)))
            if not program.outside and chance.random() < 0.5:
                body.insert(chance.randint(0, len(body)), Fail("conflict"))
        attempts.append(tuple(body))
    return replace(program, attempts=tuple(attempts))


class _Generator:
    def __init__(self, chance: random.Random, keys: random.Random, texts: random.Random, vendor: str) -> None:
        self._chance = chance
        # Separate chances: a seed gives the same steps, whatever keys the messages have.
        self._keys = keys
        # Likewise for exceptions without a text.
        self._texts = texts
        self._vendor = vendor
        self._numbers = 0

    def program(self, side: Side) -> Program:
        if side == "sharing":
            return Consumer(attempts=(self._handler(),), place=self._chance.randint(0, 3))
        if side == "outside":
            count = self._chance.choice([1, 1, 2])
            return Consumer(attempts=tuple(self._outside() for _ in range(count)), outside=True)
        if side == "consumer":
            count = self._chance.choice([1, 1, 1, 2])
            batch = self._chance.choice([1, 1, 3])
            return Consumer(attempts=tuple(self._handler() for _ in range(count)), batch=batch)
        while True:
            program = Producer(self._request())
            if any(isinstance(step, (Pair, Many, Decorated)) for step in steps_of(program)):
                return program

    def _request(self) -> tuple[Step, ...]:
        """Mostly one unit of work; now and then something before it, so that it meets a used connection."""
        before = [self._mistake(1)] if self._chance.random() < 0.15 else []
        kind = self._chance.random()
        if kind < 0.5:
            main: Step = Atomic(self._body(1))
        elif kind < 0.85:
            main = Decorated(
                self._body(1), number=self._number(), last=self._chance.random() < 0.4, unique=self._key(held=0)
            )
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

    def _outside(self) -> tuple[Step, ...]:
        """Mostly steps, then a `finish` with both parts; mistakes before it, in it and after it."""
        before = [self._outer() for _ in range(self._chance.choice([0, 1, 1, 2, 2, 3]))]
        main = list(self._handler())
        if self._chance.random() < 0.3:
            wrong: Step = self._step_call() if self._chance.random() < 0.5 else Finish(())
            wrong = wrong if self._chance.random() < 0.3 else Try((wrong,), all=self._chance.random() < 0.5)
            main.insert(self._chance.randint(0, len(main)), wrong)
        finish: Step = Finish(tuple(main))
        if self._chance.random() < 0.2:
            finish = Try((finish,), all=self._chance.random() < 0.5)
        after = [self._outer()] if self._chance.random() < 0.3 else []
        return (*before, finish, *after)

    def _step_call(self) -> StepCall:
        bodies: list[tuple[Step, ...]] = [(), (), (Pair(self._number()),), (Write(),), (Raise(),)]
        inside = self._chance.choice(bodies)
        return StepCall(
            inside,
            number=self._chance.choice([1, 2]),
            once=self._chance.random() < 0.3,
            odd=self._chance.random() < 0.05,
        )

    def _outer(self) -> Step:
        """One step of the handler outside of `finish`."""
        make: list[tuple[int, Callable[[], Step]]] = [
            (40, self._step_call),
            (8, lambda: Pair(self._number(), row_first=self._chance.random() < 0.5)),
            (8, lambda: Write(raw=self._chance.random() < 0.5)),
            (6, lambda: Atomic((self._step_call(),))),
            (4, lambda: Atomic((Write(),))),
            (6, lambda: Thread((self._step_call(),))),
            (2, lambda: Thread((Write(),))),
            (3, lambda: Finish(())),
            (3, lambda: StepCall((Finish(()),), number=3)),
            (4, lambda: self._raise(self._chance.random())),
            (5, lambda: Fail(self._chance.choice(_FAILURES[self._vendor]))),
            (8, lambda: Sql(self._chance.choice(_BY_HAND[self._vendor]), driver=self._chance.random() < 0.5)),
            (4, Close),
            (4, Kill if self._vendor == "postgresql" else Close),
        ]
        step = self._chance.choices([one for _, one in make], weights=[weight for weight, _ in make])[0]()
        return Try((step,), all=self._chance.random() < 0.4) if self._chance.random() < 0.5 else step

    def _body(self, depth: int) -> tuple[Step, ...]:
        return tuple(self._step(depth) for _ in range(self._chance.choice([1, 2, 2, 3, 3, 4])))

    def _step(self, depth: int) -> Step:
        kind = self._chance.random()
        if kind < 0.32:
            return self._publish()
        if kind < 0.4:
            return Write(raw=self._chance.random() < 0.5)
        if kind < 0.72 or depth >= _DEEPEST:
            return self._mistake(depth)
        return self._block(depth)

    def _publish(self) -> Step:
        number, row_first, raw = self._number(), self._chance.random() < 0.5, self._chance.random() < 0.4
        key = self._key()
        if self._keys.random() < 0.8:
            return Pair(number, row_first=row_first, raw=raw, unique=key)
        if not key:
            return Many(number, row_first=row_first)
        return Many(number, unique=(key, *self._keys.choices([1, 2], k=self._keys.randint(1, 3))), row_first=row_first)

    def _key(self, *, held: int = 1) -> int:
        """Few keys, so that messages of one program have the same one. `held`: how often another session holds it."""
        if self._vendor == "sqlite":
            held = 0
        return self._keys.choices([0, 1, 2, HELD], weights=[11, 4, 4, held])[0]

    def _mistake(self, depth: int) -> Step:
        """Often swallowed: what is not ends the program."""
        make: list[Callable[[], Step]] = [
            lambda: Fail(self._chance.choice(_FAILURES[self._vendor])),
            lambda: Sql(self._chance.choice(_BY_HAND[self._vendor]), driver=self._chance.random() < 0.5),
            lambda: Raise(broken=self._texts.random() < 0.6),
            SetRollback,
            Close,
            Kill if self._vendor == "postgresql" else Close,
        ]
        step = self._chance.choices(make, weights=[50, 40, 12, 5, 4, 4])[0]()
        return Try((step,)) if self._chance.random() < 0.65 else step

    def _raise(self, drawn: float) -> Step:
        return Raise(exits=drawn < 0.4, broken=drawn >= 0.7)

    def _block(self, depth: int) -> Step:
        inside = self._body(depth + 1)
        blocks: list[tuple[int, Callable[[], Block]]] = [
            (25, lambda: Try(inside)),
            (20, lambda: Atomic(inside, savepoint=self._chance.random() < 0.8)),
            (
                15,
                lambda: Decorated(
                    inside, number=self._number(), last=self._chance.random() < 0.4, unique=self._key(held=0)
                ),
            ),
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
