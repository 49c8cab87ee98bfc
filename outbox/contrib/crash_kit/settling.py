"""Lets a process handle everything that is left, without the waits of a broker in production.

Before each pass, `hasten` makes retries, delayed messages and checks due in the broker's database. After a kill,
`release` ends the leases and claims of the killed process.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final

from django.db.models.functions import Now

from outbox.broker.database.statement import Statement
from outbox.contrib.django.database.aliases import broker_executor
from outbox.contrib.django.engine.broker import get_engine
from outbox.contrib.django.ledger.ledger_checker import ledger_aliases
from outbox.contrib.django.subscribers.registry import subscriptions
from outbox.contrib.django.worker.drain import queue_messages
from outbox.errors import UsageError
from outbox.ports import AnyHandler, Consumers
from outbox.subscription import Subscription

_PAUSE_SECONDS: Final = 0.01
# Two calls overlap only if the group may run two calls at the same time.
_OVERLAPPING_THREADS: Final = 2

_RELEASE = (
    Statement("DELETE FROM {schema}.consumer"),
    Statement("UPDATE {schema}.queue_lease SET expires_at = clock_timestamp() - interval '1 second'"),
    Statement("UPDATE {schema}.leader_lease SET expires_at = clock_timestamp() - interval '1 second'"),
)
_HASTEN = (
    # Retries become due in an order that depends on the seed only.
    Statement("""
UPDATE {schema}.scheduled SET due_at = clock_timestamp() - make_interval(secs => 1 + abs(
    ('x' || substr(md5(log_id::text || %(seed)s::text), 1, 6))::bit(24)::integer) / 16777216.0)
"""),
    Statement("""
UPDATE {schema}.pending_check SET due_at = clock_timestamp(), immune_until = least(immune_until, clock_timestamp())
WHERE parked_at IS NULL AND due_at > clock_timestamp()
"""),
)


def release() -> None:
    """End the leases and claims of the killed process, as time would."""
    from outbox.contrib.django.models import ClaimEntry

    with broker_executor() as run:
        for statement in _RELEASE:
            run.execute(statement)
    for alias in ledger_aliases(usable=True):
        ClaimEntry.objects.using(alias).update(expires_at=Now())


def settle_everything(
    *,
    groups: Sequence[str],
    within_seconds: float,
    seed: int = 0,
    wrap: Callable[[AnyHandler], AnyHandler] | None = None,
    has_subscribers: bool = True,
    overlapping: bool = False,
) -> None:
    """Run check-back, sequencer and subscribers until no message waits.

    Without `overlapping`, one handler runs at a time: the groups take turns, and each group handles one message at a
    time. Otherwise chance would decide which calls overlap.

    Raises UsageError if messages still wait after this time.
    """
    deadline = time.monotonic() + within_seconds
    turns = _consumers(groups, wrap, overlapping) if has_subscribers else []
    while True:
        queue_messages()
        for consumers in turns:
            consumers.run_once()
        left = get_engine().leftover_work()
        if not left.waiting:
            return
        if time.monotonic() > deadline:
            raise UsageError(
                f"after {within_seconds:g} s, messages still wait: {'; '.join(left.waiting)}. Let the scenario publish "
                "fewer messages, pass a larger `within_seconds`, or look for a handler that waits."
            )
        with broker_executor() as run:
            for statement in _HASTEN:
                run.execute(statement, {"seed": str(seed)})
        time.sleep(_PAUSE_SECONDS)


def _consumers(
    groups: Sequence[str], wrap: Callable[[AnyHandler], AnyHandler] | None, overlapping: bool
) -> list[Consumers]:
    """Return the consumers of all groups: one for all of them if calls may overlap, otherwise one for each group."""
    wanted = [
        (_hastened(one, overlapping), wrap(handler) if wrap else handler)
        for one, handler in subscriptions(groups=groups)
    ]
    names = dict.fromkeys(one.group for one, _ in wanted)
    turns = [wanted] if overlapping else [[item for item in wanted if item[0].group == name] for name in names]
    return [get_engine().consumers(turn) for turn in turns]


def _hastened(subscription: Subscription, overlapping: bool) -> Subscription:
    """Return the subscription without waits between attempts, and with the threads of this run.

    A subscription in an ordered mode waits for a retry inside the process, where no statement can make it due. An
    outage lasts at most as long as all waits together, so equal errors in a row do not pause the subscription either.
    """
    threads = max(_OVERLAPPING_THREADS, subscription.threads) if overlapping else 1
    return replace(subscription, threads=threads, retry=replace(subscription.retry, delays_seconds=(0,)))
