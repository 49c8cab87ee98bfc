"""Where a process's work is followed as traces: one tracer, or nobody. Without one nothing is done, nothing imported.

The context of a trace travels in message headers, so it survives what the message survives: the half, check-back,
retries, a replay days later.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

from outbox.message import Delivery, Message
from outbox.transaction import Answer, Check, Decision, EndStatus, HalfTransaction

Conclude = Callable[[Sequence[object]], None]


class Tracer(Protocol):
    """Follows messages. Called from any thread, on hot paths: it must be quick, and raise nothing of its own."""

    def publishing(self, messages: Sequence[Message]) -> AbstractContextManager[Sequence[Message]]:
        """Around one publish call; gives the messages with the context of their trace in their headers."""

    def handling(self, deliveries: Sequence[Delivery]) -> AbstractContextManager[Conclude]:
        """Around one call of a handler; what it gives is told the outcomes: an exception for each one that failed."""

    def decided(self, half: HalfTransaction, decision: Decision) -> None:
        """The producer reports how a local transaction ended."""

    def answered(self, check: Check, answer: Answer, status: EndStatus | None, *, asked_at_ns: int) -> None:
        """Check-back has asked (at a time.time_ns) and reported; `status` is what the broker did, None if unknown."""


tracer: Tracer | None = None


def publishing(messages: Sequence[Message]) -> AbstractContextManager[Sequence[Message]]:
    """Around one publish call: the messages as they are to be stored."""
    return nullcontext(messages) if tracer is None else tracer.publishing(messages)


def install(chosen: Tracer | None) -> None:
    """Follow this process's work with it from now on; None stops it."""
    global tracer
    tracer = chosen
