"""The consumer runtime: one per process, for any number of subscriptions and groups.

Delivery is at least once. If a process is killed, another process delivers some handled messages again: the messages of
the last 50 ms, and all messages after the lowest unfinished message of a queue. With the inbox of an `Invoker`, a
message that is delivered twice takes effect only once. A handler that runs past its timeout cannot be stopped. The
attempt of such a handler counts as failed, and its message is sent back. Another thread replaces the thread of this
handler, and the late result of the handler is ignored. With `outbox.utils.fence.check`, the invoker can roll back the
effects of such a handler.

If many handlers hang, the process exits and its supervisor starts a new one: Python cannot stop a thread, and the
coordinator would go on renewing the leases of queues that no thread serves.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import math
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Final

from outbox.broker.consumer.dispatcher import ConsumerSession, SessionOptions, SessionTask, WakeUp
from outbox.broker.consumer.running_calls import RunningCalls
from outbox.broker.database.connection import BrokerDatabase
from outbox.broker.database.notify import RECONNECT
from outbox.broker.log.failing import FailureNote, ProcessPart
from outbox.broker.schema.refusals import naming
from outbox.codec import Codecs
from outbox.errors import (
    BrokerUnavailable,
    ConfigurationError,
    HandlersHung,
    InconsistentSubscription,
    InvalidSubscription,
    OutboxError,
    SchemaError,
    UnknownTopic,
)
from outbox.filters.filter import parse_filter
from outbox.ports import AnyHandler, ClaimingInvoker, ConsumeCounts, Invoker, SharingInvoker, call_handler
from outbox.subscription import Subscription
from outbox.utils import heartbeat

logger = logging.getLogger(__name__)

# A rolling deployment should have ended the processes with another mode or filter within this time. After this time,
# the condition `process_failing` names the waiting process.
INCONSISTENT_SECONDS: Final = 300.0


@contextlib.contextmanager
def woken_by(stop: threading.Event, wake_up: WakeUp) -> Iterator[None]:
    """Wake the dispatching thread when `stop` is set.

    The dispatching thread waits on a socket, and cannot wait for an event at the same time.
    """
    ended = threading.Event()

    def watch() -> None:
        stop.wait()
        if not ended.is_set():
            wake_up.set()

    thread = threading.Thread(target=watch, name="outbox-stop", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()


class ConsumerRuntime:
    """Consumes messages for its subscriptions. Raises a UsageError for an invalid subscription.

    This class implements outbox.ports.Consumers. If this process crashes or freezes, other processes take over its
    queues after `lease_seconds`. `session_task` is work that `run` does besides consuming (outbox.broker.leading). With
    `share`, up to `sharing_calls` calls of a subscription may share a transaction (outbox.broker.consumer.call). The
    subscriptions share `threads` handler threads (outbox.broker.consumer.scheduler); None: each has its own. `claim`
    calls the handlers with effects="outside"; a draining process waits `claims_seconds` for these handlers.
    """

    def __init__(
        self,
        database: BrokerDatabase,
        subscriptions: Sequence[tuple[Subscription, AnyHandler]],
        *,
        invoker: Invoker = call_handler,
        codecs: Codecs | None = None,
        lease_seconds: float = 10.0,
        session_task: SessionTask | None = None,
        share: SharingInvoker | None = None,
        sharing_calls: int = 1,
        threads: int | None = None,
        claim: ClaimingInvoker | None = None,
        claims_seconds: float = math.inf,
    ) -> None:
        if lease_seconds <= 0:
            raise ConfigurationError(f"lease_seconds must be positive, got {lease_seconds}.")
        _check(subscriptions)
        groups = sorted({subscription.group for subscription, _ in subscriptions})
        self._note = FailureNote(database, ProcessPart.CONSUMING, of=", ".join(groups))
        self._session_task = session_task
        self._options = SessionOptions(
            database=database,
            subscriptions=list(subscriptions),
            note=self._note,
            invoker=invoker,
            codecs=codecs or Codecs(),
            lease_seconds=lease_seconds,
            share=share,
            sharing_calls=sharing_calls if share is not None else 1,
            threads=threads,
            claim=claim,
            claims_seconds=claims_seconds,
        )

    def run(self, stop: threading.Event) -> None:
        """Consume until `stop` is set.

        After `stop` is set, finish running calls, release the leases, and leave the groups. The request of an operator
        to end this process also sets `stop`.

        This method waits while the broker's database is down. It also waits while other processes of a group use
        another mode or filter, because a rolling deployment ends them only after this process is ready. The newer
        declaration does not win: an old pod that is restarted during the deployment registers last.

        Raises UnknownTopic, InvalidSubscription, InvalidFilter or SchemaError when the subscriptions cannot be
        registered. Raises HandlersHung when too many handlers hang. Before this method raises HandlersHung, it releases
        the queues. After HandlersHung, the caller must end the process.
        """
        failures = 0
        has_registered = False
        inconsistent_since: float | None = None
        noted_in: RunningCalls | None = None
        while not stop.is_set():
            try:
                session = self._session(self._session_task, noted_in)
            except (BrokerUnavailable, SchemaError, UnknownTopic) as error:
                # A restore first empties the tables. So if this process has already registered once, it waits for the
                # end of the restore.
                if not (isinstance(error, BrokerUnavailable) or has_registered):
                    self._note.failed(error, is_last=True)
                    raise
                failures += 1
                self._note.failed(error)
                heartbeat.beat(ready=False)
                logger.warning("consuming cannot begin yet, trying again: %s", error)
                stop.wait(RECONNECT.pause_seconds(failures))
            except InconsistentSubscription as error:
                failures += 1
                now = time.monotonic()
                inconsistent_since = now if inconsistent_since is None else inconsistent_since
                if now - inconsistent_since >= INCONSISTENT_SECONDS:
                    self._note.failed(error)
                heartbeat.beat(ready=True)
                logger.warning("consuming waits for the end of other processes: %s", error)
                stop.wait(RECONNECT.pause_seconds(failures))
            except OutboxError as error:
                self._note.failed(error, is_last=True)
                raise
            else:
                failures, has_registered, noted_in = 0, True, session.running_calls
                inconsistent_since = None
                self._stay(session, stop)

    def _stay(self, session: ConsumerSession, stop: threading.Event) -> None:
        """Consume until `stop` is set, too many handlers hang, or the process has to register again."""
        with woken_by(stop, session.wake_up):
            session.coordinator.start()
            session.loop(until=lambda: stop.is_set() or session.has_to_end)
        hung = "" if stop.is_set() else session.dispatcher.hung
        if hung:
            logger.error("%s: this process gives up its queues, finishes the calls that do not hang, and ends", hung)
            if session.running_calls is not None:
                session.running_calls.hung()
        elif session.running_calls is not None and stop.is_set():
            session.running_calls.told_to_stop()
        session.finish()
        # A process that ends on purpose is not reported as failing.
        self._note.worked()
        if hung:
            raise HandlersHung(
                f"{hung}. Start the process again: it then tries the messages of the hanging handlers one by one."
            )

    def run_once(self) -> ConsumeCounts:
        """Run one bounded pass: join the groups, acquire queues, handle the present messages, and leave the groups.

        The pass does not wait for failed messages that are due later. Raises the errors of `run`, and BrokerError.
        """
        session = self._session()
        try:
            with naming("consuming", self._options.database.schema):
                session.begin_pass()
                session.loop(until=lambda: session.dispatcher.is_idle, patient=False)
        finally:
            session.finish()
        counts = session.dispatcher.counts
        return ConsumeCounts(**{name: counts[name] for name in ConsumeCounts.__dataclass_fields__})

    def _session(
        self, session_task: SessionTask | None = None, noted_in: RunningCalls | None = None
    ) -> ConsumerSession:
        with naming("the registration of consumers", self._options.database.schema):
            return ConsumerSession(self._options, session_task, noted_in)


def tune_garbage_collector() -> None:
    """Tune Python's garbage collector for a pure consumer process. Call this after the application is loaded.

    A consumer process always keeps thousands of fetched messages in memory. With Python's thresholds, the collector
    searches these messages for cycles after every 700 new objects, and finds no cycles. These searches for cycles take
    a fifth of the process's time. A `ConsumerRuntime` inside another program does not change the collector.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 10, 10)


def _check(subscriptions: Sequence[tuple[Subscription, AnyHandler]]) -> None:
    """Raise an error for contradictory or unparsable subscriptions, before the process stores anything."""
    if not subscriptions:
        raise ConfigurationError("there is nothing to consume: give the runtime at least one subscription.")
    seen: set[tuple[str, str]] = set()
    broadcast: dict[str, bool] = {}
    for subscription, _ in subscriptions:
        parse_filter(subscription.filter)
        place = (subscription.group, subscription.topic)
        if place in seen:
            raise InvalidSubscription(
                f"group {subscription.group!r} subscribes to {subscription.topic!r} twice in this process: messages of "
                f"a group are handled once. Give the second handler a group of its own."
            )
        seen.add(place)
        if broadcast.setdefault(subscription.group, subscription.broadcast) != subscription.broadcast:
            raise InvalidSubscription(
                f"group {subscription.group!r} has subscriptions with broadcast=True and without it, but all "
                "subscriptions of a group must have the same value: give one of them another group."
            )
