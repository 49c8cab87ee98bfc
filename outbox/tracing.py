"""Traces the work of a process with one tracer.

Without a tracer, the process traces nothing and imports no tracing library.

The headers of a message contain the trace context. So the half message, check-back, retries, and a replay after days
all have the same trace context.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

from outbox.message import Delivery, Message
from outbox.transaction import Answer, Check, Decision, EndStatus, HalfTransaction

Conclude = Callable[[Sequence[object]], None]


class Tracer(Protocol):
    """Traces messages.

    Any thread may call a tracer in code that runs for each message, so a tracer must be quick and must not raise.
    """

    def publishing(self, messages: Sequence[Message]) -> AbstractContextManager[Sequence[Message]]:
        """Wrap one publish call. The `with` block gets the messages, whose headers contain the trace context."""

    def handling(self, deliveries: Sequence[Delivery]) -> AbstractContextManager[Conclude]:
        """Wrap one call of a handler.

        The `with` block gets a function and calls it with the outcomes. The outcome of a failed delivery is an
        exception.
        """

    def decided(self, half: HalfTransaction, decision: Decision) -> None:
        """Record the outcome of a local transaction, as the producer reports it."""

    def answered(self, check: Check, answer: Answer, status: EndStatus | None, *, asked_at_ns: int) -> None:
        """Record an answer that check-back has reported.

        Check-back asked the checker at `asked_at_ns` (a time.time_ns).

        `status` is the broker's reply to the answer, or None if the reply is unknown.
        """


tracer: Tracer | None = None


def publishing(messages: Sequence[Message]) -> AbstractContextManager[Sequence[Message]]:
    """Wrap one publish call. The `with` block gets the messages that the broker must store."""
    return nullcontext(messages) if tracer is None else tracer.publishing(messages)


def install(chosen: Tracer | None) -> None:
    """Trace this process with the tracer `chosen` from now on. If `chosen` is None, stop the tracing."""
    global tracer
    tracer = chosen
