"""What parts do with the bodies and headers of all published messages (`outbox.hooks.add_body_step`)."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

from outbox import hooks
from outbox.broker.database.executor import Executor
from outbox.hooks import Draft, resolved
from outbox.message import Message


class BodyStep:
    """What a part does with all messages. An error refuses the messages, and nothing is published.

    A subclass overrides what it needs. A part that only adds a header overrides `encode`.
    """

    __slots__ = ()

    def encode(self, draft: Draft) -> None:
        """Change the draft of a message (its body or its headers), after the options of the message have done so."""

    def before_append(self, run: Executor, messages: Sequence[Message]) -> None:
        """Called in the transaction that stores these messages, before it stores them (the atomic path)."""

    def while_sending(self, messages: Sequence[Message]) -> AbstractContextManager[None]:
        """Return the block in which the broker stores these messages in a transaction of its own."""
        return nullcontext()


def body_steps() -> tuple[BodyStep, ...]:
    """Return the steps that the current settings use. Raises ConfigurationError."""
    made = (resolved(path)() for path in hooks.body_steps.values())
    return tuple(step for step in made if step is not None)
