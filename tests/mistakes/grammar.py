"""Application code as data: the steps of a small program.

A program is either what a producer does in one request (`Producer`) or what a subscriber does with one delivery
(`Consumer`). Steps are frozen values.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

# -- single steps -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Pair:
    """A business row and its message of the same name, next to each other: the row first, or publish first.

    `unique`: the number of the program's unique key that the message has, 0 for none. `hostile`: the name of the value
    in values.HOSTILE that the message has.
    """

    number: int
    row_first: bool = False
    raw: bool = False
    unique: int = 0
    hostile: str = ""


# The number of the unique key that a transaction of another session holds while the program runs.
HELD = 3


@dataclass(frozen=True)
class Many:
    """One publish_many of several messages, next to their business rows: all rows first, or publish_many first.

    `unique`: for each message, the number of its unique key. The messages have unique keys, or none has.
    """

    number: int
    unique: tuple[int, ...] = (0, 0)
    row_first: bool = False


@dataclass(frozen=True)
class Write:
    """A business row without a message."""

    raw: bool = False


@dataclass(frozen=True)
class Effect:
    """One part of what a handler is there for. Each handler has the parts 1 and 2."""

    part: int


FailKind = Literal[
    "select",
    "table",
    "unique",
    "raw unique",
    "statement timeout",
    "lock timeout",
    "nowait",
    "constraint at commit",
    "conflict",
]


@dataclass(frozen=True)
class Fail:
    """A statement that the database refuses; with "constraint at commit" it is COMMIT that it refuses.

    "conflict" is a serialization failure in the first call of an attempt.
    """

    how: FailKind


@dataclass(frozen=True)
class Sql:
    """A transaction statement by hand, behind Django's back."""

    text: str
    # Past Django's cursors, on the driver's own connection.
    driver: bool = False


LeaveKind = Literal["body", "language", "time zone", "variable", "session"]


@dataclass(frozen=True)
class Leave:
    """Something that the handler leaves behind: a changed body, or a state of its thread or of its session."""

    what: LeaveKind


@dataclass(frozen=True)
class SetRollback:
    """transaction.set_rollback(True)."""


@dataclass(frozen=True)
class Close:
    """connection.close()."""


@dataclass(frozen=True)
class Kill:
    """pg_terminate_backend of this connection's session, by somebody else."""


@dataclass(frozen=True)
class Raise:
    """An exception of the application, or the exit of the process (SystemExit). `broken`: its `__str__` raises."""

    exits: bool = False
    broken: bool = False


# -- blocks -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Block:
    """A step that contains steps."""

    body: tuple[Step, ...]


@dataclass(frozen=True)
class Try(Block):
    """try: … except Exception: pass, or except BaseException: pass."""

    all: bool = False


@dataclass(frozen=True)
class Atomic(Block):
    """with transaction.atomic(): …"""

    savepoint: bool = True


@dataclass(frozen=True)
class Decorated(Block):
    """A function under @transactional_message, with the row of that message as its first or last statement."""

    number: int
    last: bool = False
    unique: int = 0


@dataclass(frozen=True)
class Savepoint(Block):
    """savepoint_create() and savepoint_rollback(): always, or when the steps between them raised."""

    always: bool = False


@dataclass(frozen=True)
class Pipeline(Block):
    """with connection.connection.pipeline(): …"""


@dataclass(frozen=True)
class OnCommit(Block):
    """transaction.on_commit(…)."""


@dataclass(frozen=True)
class Thread(Block):
    """The steps in another thread, joined at once."""


@dataclass(frozen=True)
class StepCall(Block):
    """delivery.step(…): the steps of the program are in its function. `odd`: the result is not JSON."""

    number: int = 1
    once: bool = False
    odd: bool = False

    @property
    def name(self) -> str:
        """The name of the step. A step with `once` has a name of its own."""
        return f"step {self.number}{' once' if self.once else ''}"


@dataclass(frozen=True)
class Finish(Block):
    """with delivery.finish(): …"""

    @property
    def is_main(self) -> bool:
        """Whether the block has the effects of the handler."""
        return any(isinstance(step, Effect) for step in self.body)


Step = Pair | Many | Write | Effect | Fail | Leave | Sql | SetRollback | Close | Kill | Raise | Block


@dataclass(frozen=True)
class Producer:
    """One request."""

    body: tuple[Step, ...]


@dataclass(frozen=True)
class Consumer:
    """A handler that makes its mistakes in the first attempts and behaves from then on; `batch` messages at once.

    `place`: the message shares the transaction of its first attempt with others, and is the one with this number.
    `outside`: the handler has effects="outside".
    """

    attempts: tuple[tuple[Step, ...], ...]
    batch: int = 1
    place: int | None = None
    outside: bool = False

    @property
    def clean(self) -> tuple[Step, ...]:
        """The handler without mistakes."""
        both = (Effect(1), Effect(2))
        return (Finish(both),) if self.outside else both


Program = Producer | Consumer


def steps_of(program: Program) -> Iterator[Step]:
    """All steps, at any depth."""
    bodies = [program.body] if isinstance(program, Producer) else program.attempts
    for body in bodies:
        yield from _deep(body)


def _deep(body: Iterable[Step]) -> Iterator[Step]:
    for step in body:
        yield step
        if isinstance(step, Block):
            yield from _deep(step.body)
