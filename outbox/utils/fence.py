"""Lets an invoker check, just before it commits, whether the attempt still counts.

A handler can outlive its attempt: it ran past `timeout_seconds`, or its process was frozen until the queue's lease
expired. The consumer cannot stop such a handler, but the invoker can refuse its effects. It calls `check` as the last
step before COMMIT. The lease can still expire between the check and the end of COMMIT. In that case the unique key of
the inbox keeps the effects from happening twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from outbox.errors import LeaseLost

# A context variable follows the handler into asyncio tasks and into threads that asgiref starts for it.
_reason: ContextVar[Callable[[], str] | None] = ContextVar("outbox_fence", default=None)


def check() -> None:
    """Raise LeaseLost if the caller's attempt no longer counts. Outside a consumer it does nothing."""
    if reason := _why():
        raise LeaseLost(f"{reason}; roll back its effects, because the message is delivered again.")


def is_lost() -> bool:
    """Whether `check` would raise."""
    return bool(_why())


def _why() -> str:
    reason_of = _reason.get()
    return reason_of() if reason_of is not None else ""


@contextmanager
def attempt(reason: Callable[[], str]) -> Iterator[None]:
    """Run the block as an attempt. `reason` returns why the attempt no longer counts, or '' while it counts."""
    token = _reason.set(reason)
    try:
        yield
    finally:
        _reason.reset(token)
