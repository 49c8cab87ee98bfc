"""Ordinary mistakes one at a time, each as short as possible: the parts of the random programs."""

from __future__ import annotations

from typing import Final

from tests.mistakes.grammar import (
    HELD,
    Atomic,
    Close,
    Consumer,
    Decorated,
    Effect,
    Fail,
    Finish,
    Kill,
    Leave,
    Many,
    OnCommit,
    Pair,
    Pipeline,
    Producer,
    Program,
    Raise,
    Savepoint,
    Sql,
    Step,
    StepCall,
    Thread,
    Try,
    Write,
)
from tests.mistakes.values import HOSTILE

_SWALLOWED: Final = Try((Fail("select"),))
_EFFECTS: Final = (Effect(1), Effect(2))


def _request(*body: Step) -> Producer:
    return Producer(body)


def _handler(*body: Step, batch: int = 1) -> Consumer:
    return Consumer((body,), batch)


def _outside(*body: Step) -> Consumer:
    return Consumer((body,), outside=True)


# Programs that PostgreSQL and SQLite both understand.
EVERYWHERE: Final[dict[str, Program]] = {
    "nothing wrong": _request(Atomic((Pair(1), Pair(2, row_first=True))), Decorated((), number=3)),
    "an exception after publish": _request(Try((Atomic((Pair(1), Raise())),)), Decorated((Raise(),), number=2)),
    "savepoint_rollback after publish": _request(Atomic((Savepoint((Pair(1),), always=True),))),
    "ROLLBACK after publish": _request(Atomic((Pair(1), Sql("ROLLBACK")))),
    "ROLLBACK; BEGIN after publish": _request(Atomic((Pair(1), Sql("ROLLBACK; BEGIN")))),
    "ROLLBACK before publish": _request(Atomic((Sql("ROLLBACK"), Pair(1)))),
    "ROLLBACK; BEGIN in a decorated function": _request(Decorated((Sql("ROLLBACK; BEGIN"),), number=1)),
    "COMMIT and an exception": _request(Atomic((Pair(1), Sql("COMMIT"), Raise()))),
    "COMMIT; BEGIN and an exception in a decorated function": _request(
        Decorated((Sql("COMMIT; BEGIN"), Raise()), number=1)
    ),
    "an exception in on_commit": _request(Atomic((OnCommit((Raise(),)), Pair(1)))),
    "a handler without mistakes": _handler(*_EFFECTS),
    "a handler that raises": _handler(*_EFFECTS, Raise(), batch=3),
    "a handler with an exception in on_commit": _handler(*_EFFECTS, OnCommit((Raise(),))),
    "a closed connection in a decorated function": _request(Decorated((Close(),), number=1)),
    "a handler that closes its connection": _handler(*_EFFECTS, Close()),
    "a handler with COMMIT and an exception": _handler(Sql("COMMIT"), Raise(), *_EFFECTS),
    "a handler with COMMIT and a broken exception": _handler(Sql("COMMIT"), Raise(broken=True), *_EFFECTS),
    "a handler with a broken exception": _handler(*_EFFECTS, Raise(broken=True), batch=3),
    "a finish with a broken exception": _outside(Try((Finish((*_EFFECTS, Raise(broken=True))),))),
    "a handler with COMMIT of the driver and an exception": _handler(
        Effect(1), Sql("COMMIT", driver=True), Raise(), *_EFFECTS
    ),
    "a handler with ROLLBACK; BEGIN of the driver": _handler(Effect(1), Sql("ROLLBACK; BEGIN", driver=True), Effect(2)),
    "ROLLBACK; BEGIN of the driver in a decorated function": _request(
        Decorated((Sql("ROLLBACK; BEGIN", driver=True),), number=1)
    ),
    "a handler with ROLLBACK; BEGIN": _handler(Effect(1), Sql("ROLLBACK; BEGIN"), Effect(2)),
    "a write outside of finish": _outside(Try((Write(),)), Finish(_EFFECTS)),
    "a handler that catches the error of finish": _outside(Try((Finish((*_EFFECTS, Raise())),), all=True)),
    "a handler that finishes twice": _outside(Finish(_EFFECTS), Finish(())),
    "a handler with finish inside finish": _outside(Finish((*_EFFECTS, Try((Finish(()),))))),
    "a handler with finish inside a step": _outside(StepCall((Finish(()),)), Finish(_EFFECTS)),
    "a step inside finish": _outside(Finish((*_EFFECTS, StepCall(())))),
    "a step in a thread": _outside(Thread((StepCall(()),)), Finish(_EFFECTS), Raise()),
    "a step before a failure": Consumer(
        ((StepCall(()), Raise()), (StepCall(()), Finish((*_EFFECTS, Raise())))), outside=True
    ),
    "a step that may run once and fails": Consumer(
        ((StepCall((Raise(),), once=True),), (Try((StepCall((), once=True),)), Finish(_EFFECTS))), outside=True
    ),
    "a step without a result that can be stored": _outside(StepCall((), odd=True), Finish(_EFFECTS)),
    "a step inside atomic": _outside(Try((Atomic((StepCall(()),)),)), Finish(_EFFECTS)),
    "BEGIN by hand before a step": _outside(Sql("BEGIN"), StepCall(()), Finish(_EFFECTS)),
    "a connection closed before finish": _outside(StepCall(()), Close(), Finish((*_EFFECTS, Pair(1)))),
    "COMMIT by hand in finish and an exception": _outside(
        Finish((Effect(1), Sql("COMMIT", driver=True), Raise(), Effect(2)))
    ),
    "ROLLBACK by hand in finish": _outside(Finish((*_EFFECTS, Sql("ROLLBACK; BEGIN", driver=True)))),
    "an exception in on_commit of finish": _outside(Finish((*_EFFECTS, OnCommit((Raise(),))))),
    "an exit before finish": _outside(StepCall(()), Raise(exits=True), Finish(_EFFECTS)),
    "two messages of one unique key": _request(Atomic((Pair(1, unique=1), Pair(2, unique=1)))),
    "a unique key after a rollback": _request(
        Atomic((Savepoint((Pair(1, unique=1),), always=True), Pair(2, unique=1), Decorated((), number=3, unique=1)))
    ),
    "publish_many with two messages of one unique key": _request(
        Atomic((Many(1, unique=(1, 2, 1)), Many(2, unique=(2, 1), row_first=True), Pair(3, unique=2)))
    ),
    "publish_many in a savepoint that is rolled back": _request(
        Atomic((Savepoint((Many(1, unique=(1, 2)),), always=True), Many(2, unique=(2, 1))))
    ),
    "a changed body and a conflict": _handler(*_EFFECTS, Leave("body"), Fail("conflict")),
    "a changed body and a conflict in a batch": _handler(*_EFFECTS, Leave("body"), Fail("conflict"), batch=3),
    "an activated language and a conflict": _handler(*_EFFECTS, Leave("language"), Fail("conflict")),
    "an activated time zone before other messages": Consumer(((*_EFFECTS, Leave("time zone")),), place=0),
    "a variable before other messages": Consumer(((*_EFFECTS, Leave("variable")),), place=1),
    "a changed session before a failure outside of a transaction": Consumer(
        ((Leave("session"), Raise()), (Finish(_EFFECTS),)), outside=True
    ),
    **{f"hostile {name}": _request(Atomic((Pair(1, hostile=name),)), Atomic((Pair(2),))) for name in HOSTILE},
    "a handler that publishes, with ROLLBACK; BEGIN": _handler(*_EFFECTS, Pair(1), Sql("ROLLBACK; BEGIN")),
}

# Each makes PostgreSQL answer COMMIT with ROLLBACK, or ends the transaction by hand.
_ENDINGS: Final[dict[str, Step]] = {
    "a swallowed error of a missing table": Try((Fail("table"),)),
    "a swallowed error of NOWAIT": Try((Fail("nowait"),)),
    "a swallowed statement timeout": Try((Fail("statement timeout"),)),
    "a swallowed error in a pipeline": Try((Pipeline((Fail("select"),)),)),
    "ROLLBACK AND CHAIN": Sql("ROLLBACK AND CHAIN"),
    "ROLLBACK of the driver": Sql("ROLLBACK", driver=True),
    "ROLLBACK; BEGIN of the driver": Sql("ROLLBACK; BEGIN", driver=True),
    "ROLLBACK AND CHAIN of the driver": Sql("ROLLBACK AND CHAIN", driver=True),
}

# An error aborts the transaction, COMMIT is answered with ROLLBACK; there are pipelines and AND CHAIN.
POSTGRESQL_ONLY: Final[dict[str, Program]] = {
    **{
        f"{name}, {place}": program
        for name, ending in _ENDINGS.items()
        for place, program in (
            ("after publish", _request(Atomic((Pair(1), ending)))),
            ("before publish", _request(Atomic((ending, Try((Pair(1),)))))),
            ("in a decorated function", _request(Decorated((ending,), number=1))),
            ("before the message of a decorated function", _request(Decorated((ending,), number=1, last=True))),
            ("in a handler", _handler(*_EFFECTS, ending)),
        )
    },
    "a swallowed error after publish": _request(Atomic((Pair(1), _SWALLOWED))),
    "a swallowed error before publish": _request(Atomic((_SWALLOWED, Try((Pair(1, row_first=True),))))),
    "a swallowed error in a decorated function": _request(Decorated((_SWALLOWED,), number=1)),
    "a swallowed lock timeout of a unique key": _request(
        Atomic((Pair(1, unique=1), Try((Pair(2, unique=HELD),)), Try((Pair(3, row_first=True),))))
    ),
    "a lock timeout of one of several unique keys": _request(
        Try((Atomic((Savepoint((Many(1, unique=(1, HELD)),)), Pair(2))),)), Atomic((Pair(3, unique=1),))
    ),
    "a swallowed lock timeout in a nested decorated function": _request(
        Decorated((Decorated((Try((Fail("nowait"),)),), number=2),), number=1)
    ),
    "a killed connection between a step and finish": _outside(StepCall(()), Kill(), Finish((*_EFFECTS, Pair(1)))),
    "a killed connection in finish": _outside(StepCall(()), Finish((*_EFFECTS, Pair(1), Try((Kill(),))))),
    "a swallowed error in finish": _outside(Finish((*_EFFECTS, _SWALLOWED))),
    "a killed connection in a decorated function": _request(Decorated((Kill(),), number=1)),
    "a handler whose connection is killed": _handler(*_EFFECTS, Kill()),
    "an error in a pipeline before publish": _request(Atomic((Try((Pipeline((Fail("select"), Pair(1))),)),))),
    "an error in a pipeline after publish": _request(Atomic((Try((Pipeline((Pair(1), Fail("select"))),)),))),
    "a constraint that fails at COMMIT": _request(Atomic((Pair(1), Fail("constraint at commit")))),
    "a handler with a swallowed error": _handler(*_EFFECTS, _SWALLOWED, batch=3),
    "a handler that publishes, with a swallowed error": _handler(*_EFFECTS, Pair(1), _SWALLOWED),
}


def specimens(vendor: str) -> dict[str, Program]:
    """Those that a database understands."""
    return EVERYWHERE | POSTGRESQL_ONLY if vendor == "postgresql" else dict(EVERYWHERE)
