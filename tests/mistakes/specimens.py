"""Ordinary mistakes one at a time, each as short as possible: the parts of the random programs."""

from __future__ import annotations

from typing import Final

from tests.mistakes.grammar import (
    Atomic,
    Close,
    Consumer,
    Decorated,
    Effect,
    Fail,
    Kill,
    OnCommit,
    Pair,
    Pipeline,
    Producer,
    Program,
    Raise,
    Savepoint,
    Sql,
    Step,
    Try,
)

_SWALLOWED: Final = Try((Fail("select"),))
_EFFECTS: Final = (Effect(1), Effect(2))


def _request(*body: Step) -> Producer:
    return Producer(body)


def _handler(*body: Step, batch: int = 1) -> Consumer:
    return Consumer((body,), batch)


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
    "a handler with COMMIT of the driver and an exception": _handler(
        Effect(1), Sql("COMMIT", driver=True), Raise(), *_EFFECTS
    ),
    "a handler with ROLLBACK; BEGIN of the driver": _handler(Effect(1), Sql("ROLLBACK; BEGIN", driver=True), Effect(2)),
    "ROLLBACK; BEGIN of the driver in a decorated function": _request(
        Decorated((Sql("ROLLBACK; BEGIN", driver=True),), number=1)
    ),
    "a handler with ROLLBACK; BEGIN": _handler(Effect(1), Sql("ROLLBACK; BEGIN"), Effect(2)),
    "a handler that publishes, with ROLLBACK; BEGIN": _handler(*_EFFECTS, Pair(1), Sql("ROLLBACK; BEGIN")),
}

# An error aborts the transaction, COMMIT is answered with ROLLBACK; there are pipelines and AND CHAIN.
POSTGRESQL_ONLY: Final[dict[str, Program]] = {
    "a swallowed error after publish": _request(Atomic((Pair(1), _SWALLOWED))),
    "a swallowed error before publish": _request(Atomic((_SWALLOWED, Try((Pair(1, row_first=True),))))),
    "a swallowed error in a decorated function": _request(Decorated((_SWALLOWED,), number=1)),
    "a swallowed lock timeout in a nested decorated function": _request(
        Decorated((Decorated((Try((Fail("nowait"),)),), number=2),), number=1)
    ),
    "a killed connection in a decorated function": _request(Decorated((Kill(),), number=1)),
    "a handler whose connection is killed": _handler(*_EFFECTS, Kill()),
    "ROLLBACK AND CHAIN in a decorated function": _request(Decorated((Sql("ROLLBACK AND CHAIN"),), number=1)),
    "an error in a pipeline before publish": _request(Atomic((Try((Pipeline((Fail("select"), Pair(1))),)),))),
    "an error in a pipeline after publish": _request(Atomic((Try((Pipeline((Pair(1), Fail("select"))),)),))),
    "a constraint that fails at COMMIT": _request(Atomic((Pair(1), Fail("constraint at commit")))),
    "a handler with a swallowed error": _handler(*_EFFECTS, _SWALLOWED, batch=3),
    "a handler that publishes, with a swallowed error": _handler(*_EFFECTS, Pair(1), _SWALLOWED),
}


def specimens(vendor: str) -> dict[str, Program]:
    """Those that a database understands."""
    return EVERYWHERE | POSTGRESQL_ONLY if vendor == "postgresql" else dict(EVERYWHERE)
