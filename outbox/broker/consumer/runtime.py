"""Consuming: one runtime per process, any number of subscriptions and groups.

    handler threads  <->  dispatching thread (`run`)  <->  coordinator (leases)
                               fetches, stores offsets        heartbeats, rebalances

Delivery is at least once. If a process is killed, the messages that it had handled but not stored are delivered again:
at most 50 ms of them, and per queue those beyond its lowest unfinished message. The inbox of an `Invoker` makes effects
happen once. A handler that runs past its timeout cannot be stopped. Its attempt counts as failed and is sent back, its
thread is replaced, and its late result is ignored. `outbox.utils.fence.check` lets the invoker roll its effects back.
"""

from __future__ import annotations

import gc
import logging
import threading
import uuid
from collections.abc import Sequence

from outbox.broker.consumer.session import ConsumerSession, SessionTask, woken_by
from outbox.broker.database.connection import BrokerDatabase
from outbox.broker.database.executor import Executor
from outbox.broker.database.notify import RECONNECT
from outbox.broker.dispatch.running_calls import RunningCalls
from outbox.broker.dispatch.subscriptions import ConsumingGroup
from outbox.broker.groups import registration
from outbox.broker.groups.rebalance import Strategy, by_name
from outbox.broker.log.failing import FailureNote, ProcessPart
from outbox.broker.schema import install
from outbox.broker.schema.refusals import naming
from outbox.codec import Codecs
from outbox.errors import (
    BrokerUnavailable,
    ConfigurationError,
    HandlersHung,
    InvalidSubscription,
    OutboxError,
    SchemaError,
    UnknownTopic,
)
from outbox.filters.filter import parse_filter
from outbox.ports import AnyHandler, ConsumeCounts, Invoker, call_handler
from outbox.subscription import Subscription
from outbox.utils import heartbeat

logger = logging.getLogger(__name__)


class ConsumerRuntime:
    """Consumes for its subscriptions (implements outbox.ports.Consumers). Raises UsageErrors for invalid ones.

    `lease_seconds`: the time after a crash or freeze of this process until others take over its queues. `strategy`: how
    queues are shared: averagely, circle, consistent_hash, config:NUMBERS, or a function (groups.rebalance).
    `session_task`: further work that `run` does (outbox.broker.leading).
    """

    def __init__(
        self,
        database: BrokerDatabase,
        subscriptions: Sequence[tuple[Subscription, AnyHandler]],
        *,
        invoker: Invoker = call_handler,
        codecs: Codecs | None = None,
        lease_seconds: float = 10.0,
        strategy: str | Strategy = "averagely",
        session_task: SessionTask | None = None,
    ) -> None:
        if lease_seconds <= 0:
            raise ConfigurationError(f"lease_seconds must be positive, got {lease_seconds}.")
        _check(subscriptions)
        self._database = database
        self._subscriptions = list(subscriptions)
        self._invoker = invoker
        self._codecs = codecs or Codecs()
        self._lease_seconds = lease_seconds
        self._strategy = by_name(strategy) if isinstance(strategy, str) else strategy
        self._session_task = session_task
        groups = sorted({subscription.group for subscription, _ in subscriptions})
        self._note = FailureNote(database, ProcessPart.CONSUMING, of=", ".join(groups))

    def run(self, stop: threading.Event) -> None:
        """Consume until `stop` is set. Then start no more handlers, wait for running ones, store, release and leave.

        While the broker's database is down, it waits. Raises UnknownTopic, InvalidSubscription, InvalidFilter or
        SchemaError when the subscriptions cannot be registered. Raises HandlersHung when too many handlers hang; its
        queues are then released already, and its process has to end.
        """
        failures = 0
        has_registered = False
        noted_in: RunningCalls | None = None
        while not stop.is_set():
            try:
                session = self._session(self._session_task, noted_in)
            except (BrokerUnavailable, SchemaError, UnknownTopic) as error:
                # A process that had registered waits for the end of a restore, which empties the tables first.
                if not (isinstance(error, BrokerUnavailable) or has_registered):
                    self._note.failed(error, is_last=True)
                    raise
                failures += 1
                self._note.failed(error)
                heartbeat.beat(ready=False)
                logger.warning("consuming cannot begin yet, trying again: %s", error)
                stop.wait(RECONNECT.pause_seconds(failures))
            except OutboxError as error:
                self._note.failed(error, is_last=True)
                raise
            else:
                failures, has_registered, noted_in = 0, True, session.running_calls
                self._stay(session, stop)

    def _stay(self, session: ConsumerSession, stop: threading.Event) -> None:
        """Consume until `stop` is set, too many handlers hang, or the process has to register again."""
        with woken_by(stop, session.wake_up):
            session.coordinator.start()
            session.loop(until=lambda: stop.is_set() or bool(session.dispatcher.hung) or session.is_outdated)
        hung = "" if stop.is_set() else session.dispatcher.hung
        if hung:
            logger.error("%s: this process gives up its queues, finishes what does not hang, and ends", hung)
        elif session.running_calls is not None and stop.is_set():
            session.running_calls.told_to_stop()
        session.finish()
        # A process that ends on purpose does not count as a failing one.
        self._note.worked()
        if hung:
            raise HandlersHung(f"{hung}; start the process again, the messages that hang are tried one by one.")

    def run_once(self) -> ConsumeCounts:
        """Run one bounded pass: join, acquire this process's share, handle what its queues hold now, leave.

        It does not wait for failed messages that are due later. Raises the errors of `run`, and BrokerError.
        """
        session = self._session()
        try:
            with naming("consuming", self._database.schema):
                session.coordinator.run_once()
                session.bound()
                session.coordinator.start()
                session.loop(until=lambda: session.dispatcher.is_idle, patient=False)
        finally:
            session.finish()
        counts = session.dispatcher.counts
        return ConsumeCounts(**{name: counts[name] for name in ConsumeCounts.__dataclass_fields__})

    def _session(
        self, session_task: SessionTask | None = None, noted_in: RunningCalls | None = None
    ) -> ConsumerSession:
        with naming("the registration of consumers", self._database.schema):
            return ConsumerSession(
                self._database,
                self._register,
                invoker=self._invoker,
                codecs=self._codecs,
                lease_seconds=self._lease_seconds,
                strategy=self._strategy,
                session_task=session_task,
                note=self._note,
                noted_in=noted_in,
            )

    def _register(self, run: Executor, instance: uuid.UUID) -> list[ConsumingGroup]:
        install.check_schema(run.connection, run.schema)
        found: dict[str, ConsumingGroup] = {}
        for subscription, handler in self._subscriptions:
            ids = registration.register(run, subscription, instance=instance)
            group = found.setdefault(
                subscription.group,
                ConsumingGroup(ids.group_id, subscription.group, subscription.broadcast),
            )
            group.subscribe(subscription, handler, ids.topic_id)
        return list(found.values())


def tune_garbage_collector() -> None:
    """Tune Python's garbage collector for a pure consumer process; call it once the application is loaded.

    Thousands of fetched messages are alive at any time. With Python's thresholds the collector searches them for cycles
    after every 700 new objects and finds none. That takes a fifth of such a process's time (docs/decisions/008).
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 10, 10)


def _check(subscriptions: Sequence[tuple[Subscription, AnyHandler]]) -> None:
    """Raise for subscriptions that contradict each other or cannot be parsed, before anything is stored."""
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
                f"group {subscription.group!r} has broadcast and other subscriptions: a group is one or the other."
            )
