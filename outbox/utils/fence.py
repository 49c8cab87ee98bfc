"""Lets an invoker check directly before COMMIT whether the attempt still counts.

A handler may still run after its attempt has ended, because the handler ran past `timeout_seconds`, or because its
process was frozen until the queue's lease expired. The consumer cannot stop such a handler, but the invoker can refuse
its effects: the invoker calls `check` as the last step before COMMIT. If the lease expires between this call and the
end of COMMIT, the unique key of the inbox prevents a second effect.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Final

from outbox.errors import LeaseLost

# A context variable has the same value in the handler, in the handler's asyncio tasks, and in the threads that asgiref
# starts for the handler.
_reason: ContextVar[Callable[[], str] | None] = ContextVar("outbox_fence", default=None)


def check() -> None:
    """Raise LeaseLost if the caller's attempt no longer counts. Outside a consumer, do nothing."""
    reason_of = _reason.get()
    if reason_of is not None and (reason := reason_of()):
        raise LeaseLost(f"{reason}: roll back the effects of this attempt, because the message is delivered again.")


def is_lost() -> bool:
    """Whether a call of `check` would raise LeaseLost."""
    reason_of = _reason.get()
    return reason_of is not None and bool(reason_of())


# Does the same as `attempt` until the present context (contextvars) ends.
begin: Final = _reason.set


@contextmanager
def attempt(reason: Callable[[], str]) -> Iterator[None]:
    """Run the block as an attempt.

    `reason` returns the reason why the attempt no longer counts, or '' while the attempt counts.
    """
    token = _reason.set(reason)
    try:
        yield
    finally:
        _reason.reset(token)
