"""Traces the work of a process through one tracer. Without a tracer, nothing is traced or imported.

The trace context is in the headers of a message. So the half message, check-back, the retries, and a replay days later
all have the same trace context.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Final, Protocol

from outbox.message import Delivery, Message
from outbox.transaction import Answer, Check, Decision, EndStatus, HalfTransaction

Conclude = Callable[[Sequence[object]], None]


class Tracer(Protocol):
    """Traces messages. Any thread may call it on hot paths, so it must be quick and must not raise."""

    def publishing(self, messages: Sequence[Message]) -> AbstractContextManager[Sequence[Message]]:
        """Wrap one publish call. The context gives the messages with their trace context in the headers."""

    def handling(self, deliveries: Sequence[Delivery]) -> AbstractContextManager[Conclude]:
        """Wrap one call of a handler.

        The context gives a function that takes the outcomes: an exception for each delivery that failed.
        """

    def decided(self, half: HalfTransaction, decision: Decision) -> None:
        """Record how a local transaction ended, as its producer reports it."""

    def answered(self, check: Check, answer: Answer, status: EndStatus | None, *, asked_at_ns: int) -> None:
        """Record that check-back asked at `asked_at_ns` (a time.time_ns) and reported the answer.

        `status` is the broker's reply to the answer, or None if it is unknown.
        """


tracer: Tracer | None = None


def publishing(messages: Sequence[Message]) -> AbstractContextManager[Sequence[Message]]:
    """Wrap one publish call. The context gives the messages to store."""
    return nullcontext(messages) if tracer is None else tracer.publishing(messages)


def handling(deliveries: Sequence[Delivery]) -> AbstractContextManager[Conclude]:
    """Wrap one call of a handler. The context gives a function that takes the outcomes."""
    return _UNTRACED if tracer is None else tracer.handling(deliveries)


def _ignore(outcomes: Sequence[object]) -> None:
    """Without a tracer, the outcomes of a call are not traced."""


_UNTRACED: Final = nullcontext(_ignore)


def install(chosen: Tracer | None) -> None:
    """Trace this process with `chosen` from now on. None ends the tracing."""
    global tracer
    tracer = chosen
