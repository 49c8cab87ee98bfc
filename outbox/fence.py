"""Lets an invoker ask, right before it commits, whether the attempt it runs still counts.

A handler can outlive its attempt: it ran past `timeout_seconds`, or its process was frozen until the queue's lease
was over. The consumer cannot stop it, but it can tell: call `check` as the last step before COMMIT. What passes the
check may still lose a race by the length of that commit; the inbox's unique row settles it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from outbox.errors import LeaseLost

# A context variable follows the handler into asyncio tasks and into threads that asgiref starts for it.
_reason: ContextVar[Callable[[], str] | None] = ContextVar("outbox_fence", default=None)


def check() -> None:
    """Raise LeaseLost when the attempt that calls this does not count any more. Outside a consumer: nothing."""
    if reason := _why():
        raise LeaseLost(f"{reason}; its effects must be rolled back, the message is delivered again.")


def is_lost() -> bool:
    """Whether `check` would raise."""
    return bool(_why())


def _why() -> str:
    reason_of = _reason.get()
    return reason_of() if reason_of is not None else ""


@contextmanager
def attempt(reason: Callable[[], str]) -> Iterator[None]:
    """Run an attempt: `reason` says why it does not count any more, or ''."""
    token = _reason.set(reason)
    try:
        yield
    finally:
        _reason.reset(token)
