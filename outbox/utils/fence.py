"""Lets an invoker check directly before COMMIT whether the attempt still counts.

    fence.check()
    connection.commit()

A handler may still run after its attempt has ended, because it ran past `timeout_seconds`, or because its process was
frozen until the lease expired. The consumer cannot stop it, but the invoker can refuse its effects. If the lease
expires between this call and the end of COMMIT, the unique key of the inbox prevents a second effect.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from outbox.errors import LeaseLost

# A context variable has the same value in the handler, in the handler's asyncio tasks, and in the threads that asgiref
# starts for the handler.
_reason: ContextVar[Callable[[], str] | None] = ContextVar("outbox_fence", default=None)
_committing: ContextVar[Callable[[bool], None] | None] = ContextVar("outbox_fence_committing", default=None)


def check(*, commits: bool = True) -> None:
    """Raise LeaseLost if the caller's attempt no longer counts. Outside a consumer, do nothing.

    If the caller does not commit next, it passes `commits=False`: once an attempt commits, only its inbox knows whether
    it has failed.
    """
    committing = _committing.get()
    if commits and committing is not None:
        # Before the reason is read: if the attempt is given up at this moment, either the consumer or this thread sees
        # what the other one has done.
        committing(True)
    reason_of = _reason.get()
    if reason_of is not None and (reason := reason_of()):
        raise LeaseLost(f"{reason}: roll back the effects of this attempt, because the message is delivered again.")


def rolled_back() -> None:
    """Record that the transaction for which `check` was called has not committed, and the attempt continues."""
    committing = _committing.get()
    if committing is not None:
        committing(False)


def is_lost() -> bool:
    """Whether a call of `check` would raise LeaseLost."""
    reason_of = _reason.get()
    return reason_of is not None and bool(reason_of())


def begin(reason: Callable[[], str], committing: Callable[[bool], None]) -> None:
    """Do the same as `attempt` until the present context (contextvars) ends.

    `committing` is told whether a transaction of the attempt may have committed.
    """
    _reason.set(reason)
    _committing.set(committing)


@contextmanager
def attempt(reason: Callable[[], str]) -> Iterator[None]:
    """Run the block as an attempt. `reason` returns why it no longer counts, or '' while it does."""
    token = _reason.set(reason)
    try:
        yield
    finally:
        _reason.reset(token)
