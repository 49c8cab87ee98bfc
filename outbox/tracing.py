"""Traces the work of a process through one tracer. Without a tracer nothing is done and nothing is imported.

The trace context travels in message headers. It survives with the message: the half, check-back, retries, and
a replay days later.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

from outbox.message import Delivery, Message
from outbox.transaction import Answer, Check, Decision, EndStatus, HalfTransaction

Conclude = Callable[[Sequence[object]], None]


class Tracer(Protocol):
    """Traces messages. It is called from any thread, on hot paths: it must be quick and must not raise."""

    def publishing(self, messages: Sequence[Message]) -> AbstractContextManager[Sequence[Message]]:
        """Wraps one publish call; gives the messages with their trace context in the headers."""

    def handling(self, deliveries: Sequence[Delivery]) -> AbstractContextManager[Conclude]:
        """Wraps one call of a handler.

        It gives a function that takes the outcomes: an exception for each delivery that failed.
        """

    def decided(self, half: HalfTransaction, decision: Decision) -> None:
        """The producer reports how a local transaction ended."""

    def answered(self, check: Check, answer: Answer, status: EndStatus | None, *, asked_at_ns: int) -> None:
        """Check-back asked at `asked_at_ns` (a time.time_ns) and reported.

        `status` is the broker's reply to the answer, None if unknown.
        """


tracer: Tracer | None = None


def publishing(messages: Sequence[Message]) -> AbstractContextManager[Sequence[Message]]:
    """Wraps one publish call; gives the messages to store."""
    return nullcontext(messages) if tracer is None else tracer.publishing(messages)


def install(chosen: Tracer | None) -> None:
    """Trace this process with `chosen` from now on; None stops it."""
    global tracer
    tracer = chosen
