"""The record of one run of a program: calls, results, and the blocks that were open at that moment."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from uuid import UUID

from tests.mistakes.grammar import Program


@dataclass(frozen=True)
class Sent:
    """What a message says, besides its key: the headers of the program, and the decoded body."""

    key: str
    tag: str
    headers: Mapping[str, str]
    body: Any


@dataclass
class PairSeen:
    """The events at one Pair or Decorated step. The key is the name of the row and of the message."""

    key: str
    decorated: bool = False
    # Whether Django held the call to be inside atomic().
    in_block: bool = False
    # The result of others.is_alive at the publish call.
    alive: bool | None = None
    row_first: bool = False
    returned: bool = False
    # The program's unique key that the message has, and the message that the receipt names as its holder.
    unique: str = ""
    duplicate_of: UUID | None = None
    # A message with a hostile value, as a consumer has to get it; None for other messages.
    sent: Sent | None = None
    # The error with which publish refused a hostile value, if only the driver noticed it.
    foreign: str = ""
    # The decorated function was the outermost block, left without an exception, and Django did mean to commit.
    claims_commit: bool = False


@dataclass
class AttemptSeen:
    """One call of a handler: for each effect it wrote, whether that was after a COMMIT by hand."""

    counts_as_handled: bool = False
    skipped: bool = False
    # The error says that no later attempt can succeed: the message becomes a dead letter, which an operator sees.
    given_up: bool = False
    error: str = ""
    by_hand: bool = False
    committed_by_hand: bool = False
    effects: list[tuple[int, bool]] = field(default_factory=list)
    # Whether a handler with effects="outside" has begun the `finish` with its effects; None for other handlers.
    reached_finish: bool | None = None
    # For each `finish` that returned: whether it had the handler's effects.
    finishes: list[bool] = field(default_factory=list)
    # Whether the database has reported a conflict in this attempt.
    has_conflicted: bool = False
    # For each step: its name, and "called" or "returned".
    steps: list[tuple[str, str]] = field(default_factory=list)


@dataclass
class Trace:
    """One run of a program."""

    name: str
    program: Program
    pairs: list[PairSeen] = field(default_factory=list)
    attempts: list[AttemptSeen] = field(default_factory=list)
    keys: list[str] = field(default_factory=list)
    # The messages that shared the transaction of the first attempt. Their handlers make no mistakes.
    others: list[str] = field(default_factory=list)
    # A COMMIT by hand was executed after a publish call that had been refused.
    committed_after_refusal: bool = False
    # The rows that a handler with effects="outside" has tried to write outside of its steps and `finish`.
    strays: list[str] = field(default_factory=list)
    # What calls of handlers have met of earlier calls.
    leftovers: list[str] = field(default_factory=list)
    ended_with: str = ""
