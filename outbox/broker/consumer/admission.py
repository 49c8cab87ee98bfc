"""Admission: a part decides when the calls of a subscription start, beside order, threads and outages.

A message may start now, not before a time, or waits for its key. Until then it stays in its lane: it uses no attempt
and no thread, and the messages of other subscriptions continue. A part joins with `hooks.add_admission`.

What an admission gives is valid for a while (`AdmissionLease`), because other processes get it when this one dies. So
the admission renews it in `prepare`, and the handler's thread looks at the lease again before it starts a call.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol
from uuid import UUID

from outbox import hooks
from outbox.broker.consumer.owned_queue import Subscribed
from outbox.broker.consumer.work import FetchedEntry, Lane
from outbox.broker.consumer.worker_pool import WorkerPool
from outbox.broker.database.executor import Executor


class Admission(Protocol):
    """Admits the calls of one subscription of this process. Only the dispatching thread uses it."""

    def __init__(self, option: Any, subscribed: Subscribed, pool: WorkerPool, lanes: Sequence[Lane]) -> None:
        """`option`: the option of the subscription. `pool`: with `pool.allow`, only a number of calls run at the same
        time. `lanes`: the lanes in which the messages wait."""

    def prepare(self, run: Executor, instance: UUID, now: float, *, term_seconds: float, may_start: bool) -> None:
        """Renew, take and give back what is due; called in every step, before messages are taken from the lanes.

        `run`: a connection in autocommit mode. `term_seconds`: the lease term. `may_start`: whether the dispatching
        thread starts messages of this subscription now. It must not wait.
        """

    def admits(self, now: float) -> bool:
        """Return whether a message may be taken from the lanes now, in the step of the last `prepare`."""

    def spend(self, items: Sequence[FetchedEntry], now: float) -> None:
        """Record the messages that a call has taken from a lane."""

    def next_at(self, now: float) -> float | None:
        """Return the next time at which `prepare` or `admits` may have another result; None if there is none."""

    @property
    def waiting(self) -> int:
        """The number of messages in the lanes that may wait for this admission."""

    def forget(self) -> None:
        """Forget all that was given, because the server has begun a new life. Admit nothing before the next renewal."""


def admission_of(subscribed: Subscribed) -> tuple[Any, type[Admission]] | None:
    """Return the option of a subscription that decides when its calls start, and its kind of admission, if it has one.

    Raises ImportError.
    """
    for option in subscribed.subscription.options:
        if (path := hooks.admissions.get(type(option))) is not None:
            return option, hooks.resolved(path)
    return None
