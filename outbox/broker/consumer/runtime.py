"""The consumer runtime: one per process, for any number of subscriptions and groups.

    handler threads  <->  dispatching thread (`run`)  <->  coordinator (leases)
                               fetches, stores offsets        heartbeats, rebalances

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
import select
import socket
import threading
import time
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Final, Protocol

import psycopg

from outbox.broker.consumer import running_calls
from outbox.broker.consumer.call import Caller, HandlerCall
from outbox.broker.consumer.coordinator import Coordinator
from outbox.broker.consumer.dispatcher import Dispatcher
from outbox.broker.consumer.owned_queue import ConsumingGroup, Ownership
from outbox.broker.consumer.running_calls import RunningCalls
from outbox.broker.consumer.scheduler import STUCK_LIMIT
from outbox.broker.database import timeouts
from outbox.broker.database.connection import BrokerConnection, BrokerDatabase
from outbox.broker.database.executor import Executor
from outbox.broker.database.notify import RECONNECT, Announcements, Channel, listen
from outbox.broker.database.sender import AfterTick
from outbox.broker.groups import lives, members, registration
from outbox.broker.log.failing import FailureNote, ProcessPart
from outbox.broker.schema import install
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


# -- waking the dispatching thread -----------------------------------------------------------------
#
# Other threads use a `WakeUp` to wake the dispatching thread, which waits on a socket.


class WakeUp:
    """`set` makes `socket` readable until `clear`. A second `set` before `clear` does nothing."""

    def __init__(self) -> None:
        self.socket, self._sender = socket.socketpair()
        self.socket.setblocking(False)
        self._sender.setblocking(False)
        self._is_set = False

    def set(self) -> None:
        """Wake the waiting thread. The caller first stores the data that this thread should see."""
        if not self._is_set:
            self._is_set = True
            # If the socket is full or closed, the waiting thread is already awake or has ended.
            with contextlib.suppress(OSError):
                self._sender.send(b"!")

    def wait(self, seconds: float) -> None:
        """Wait until another thread calls `set`, at most `seconds`."""
        poller = select.poll()
        poller.register(self.socket, select.POLLIN)
        poller.poll(seconds * 1000)

    def clear(self) -> None:
        """Make the socket ready for the next `set`. The caller looks for work after this call."""
        try:  # noqa: SIM105 (`suppress` takes three frames, at each wait)
            # The socket never holds more than 64 bytes.
            self.socket.recv(64)
        except OSError:
            pass
        # Reset the flag last. If the flag were reset first, the `recv` above could remove the byte of a new `set`, and
        # all later calls of `set` would be ignored.
        self._is_set = False

    def close(self) -> None:
        """Release the sockets."""
        self.socket.close()
        self._sender.close()


# -- one membership of this process in its groups --------------------------------------------------
#
# A `ConsumerSession` is one membership of this process in its groups. A session has the connection and the loop around
# the dispatcher.


# If no notification arrives, the process looks at its queues at this interval (seconds). The first constant applies to
# a connection with LISTEN, and the second constant to a connection without LISTEN.
_LISTENING_POLL_SECONDS: Final = 3.0
_POLL_SECONDS: Final = 1.0
_THREADS_SECONDS: Final = 2.0
# The loop beats at this interval (seconds), and after each failure.
_BEAT_SECONDS: Final = 0.5
# A rolling deployment should have ended the processes with another mode or filter within this time. After this time,
# the condition `process_failing` names the waiting process.
INCONSISTENT_SECONDS: Final = 300.0


class SessionTask(Protocol):
    """Work besides consuming that the dispatching thread of a consumer process does on its listening connection."""

    def begin(self, run: Executor, instance: uuid.UUID) -> None:
        """Begin the work on a new connection."""

    def lead(
        self, run: Executor, announcements: Announcements, *, decided: bool, after: AfterTick | None = None
    ) -> str | None:
        """Do a limited amount of due work. Return the ids of the queues that have grown: '' for any, None for none.

        `decided` says that a notification on Channel.DECIDED has arrived. `after` is the fetch that may share the round
        trip of a tick.

        Raises only psycopg.Error, and only if the connection is lost.
        """

    def wait_seconds(self) -> float:
        """Return how many seconds the caller may wait for a notification before work is due."""

    @property
    def is_gathering(self) -> bool:
        """Whether the caller should wait a moment before it reads notifications."""

    def interrupted(self) -> None:
        """Note that the connection is lost."""

    def end(self, run: Executor) -> None:
        """Stop this work, so that another process can continue the work at once.

        Raises psycopg.Error. The caller calls this method before it stops or gives up its connection.
        """


class ConsumerSession:
    """One membership of this process in its groups.

    The constructor registers the process, and raises psycopg.Error, BrokerUnavailable, or the errors of
    `ConsumerRuntime.register`.

    `noted_in` is the file in which an earlier session of this process noted its calls. The parent process gives
    each consumer process only one file for notes.
    """

    def __init__(
        self, runtime: ConsumerRuntime, session_task: SessionTask | None = None, noted_in: RunningCalls | None = None
    ) -> None:
        self._runtime = runtime
        self._database = database = runtime.database
        self._poll_seconds = _POLL_SECONDS
        self.wake_up = WakeUp()
        self._run: Executor | None = None
        self._announcements: Announcements | None = None
        self._polled_at = 0.0
        # The ids of the queues that have grown; None if any queue may have grown.
        self._grown: set[int] | None = None
        self._is_new = True
        self._decided = False
        # Whether the dispatcher has made a step on this connection. Before the first step, this process does not lead,
        # because the step may fail on this connection.
        self._has_stepped = False
        self._session_task = session_task
        self._instance = instance = uuid.uuid4()
        try:
            groups = runtime.register(self._connected(), instance)
        except BaseException:
            self._disconnect()
            self.wake_up.close()
            raise
        self._ownership = Ownership(self.wake_up.set)
        self.coordinator = Coordinator(
            database,
            instance,
            groups,
            self._ownership,
            lease_seconds=runtime.lease_seconds,
            report=lambda: self.dispatcher.calls.report(),
        )
        self.running_calls = noted_in or _running_calls(instance, groups)
        if noted_in is not None:
            noted_in.go_on_as(instance)
        caller = Caller(
            runtime.invoker,
            runtime.codecs,
            self._finished,
            self.running_calls,
            runtime.share,
            claim=runtime.claim,
            wake=self.wake_up.set,
        )
        self.dispatcher = Dispatcher(
            instance,
            groups,
            self._ownership,
            caller.run,
            lease_seconds=runtime.lease_seconds,
            sharing_calls=runtime.sharing_calls,
            threads=runtime.threads,
        )

    @property
    def has_to_end(self) -> bool:
        """Whether too many handlers hang, or the process needs a new session.

        A new session is needed if the broker was restored to a time before the registration of this session.
        """
        return self._ownership.is_outdated or self.dispatcher.hung != ""

    def begin_pass(self) -> None:
        """Acquire queues, and from now on fetch only the messages that are in the queues now."""
        self.coordinator.run_once(self._lent())
        self.dispatcher.bound(self._run_in_current_life())
        self.coordinator.start(after_a_round=True)

    def loop(self, until: Callable[[], bool], *, patient: bool = True) -> None:
        """Make steps and wait between them, until the function `until` returns True after a step.

        If `patient` is true, the loop pauses after a database error, and then tries again.
        """
        failures, beat_at = 0, 0.0
        while True:
            try:
                self._step()
                if (now := time.monotonic()) >= beat_at:
                    heartbeat.beat(ready=True)
                    self._runtime.note.worked()
                    beat_at = now + _BEAT_SECONDS
                if until():
                    return
                self._wait(self._polled_at + self._poll_seconds - time.monotonic())
                failures = 0
            except (psycopg.Error, BrokerUnavailable) as error:
                if not patient:
                    raise
                self._disconnect()
                if until():
                    return
                failures, beat_at = failures + 1, 0.0
                heartbeat.beat(ready=False)
                self._runtime.note.failed(error)
                pause = RECONNECT.pause_seconds(failures)
                logger.warning("consuming is interrupted, trying again in %.1f s: %s", pause, error)
                self.wake_up.wait(pause)
                self.wake_up.clear()

    def finish(self) -> None:
        """Let running handlers finish, store offsets, release the leases, and leave the groups.

        The end of a session takes at most the timeout of the handlers.
        """
        session_task, self._session_task = self._session_task, None
        if session_task is not None and self._run is not None:
            with contextlib.suppress(psycopg.Error):
                session_task.end(self._run)
        self.dispatcher.drain(claims_seconds=self._runtime.claims_seconds)
        give_up_at = time.monotonic() + self._runtime.lease_seconds

        def over() -> bool:
            # Without a database, this process cannot store or release anything, so it ends and its leases expire.
            lost = self._run is None and time.monotonic() > give_up_at
            return self.dispatcher.is_drained or (lost and not self.dispatcher.calls.any_running)

        self.loop(until=over)
        self.coordinator.stop(self._lent())
        self.dispatcher.scheduler.stop(within_seconds=_THREADS_SECONDS)
        self._disconnect()
        self.wake_up.close()

    def _finished(self, work: HandlerCall) -> None:
        if self.dispatcher.calls.finished(work):
            self.wake_up.set()

    def _step(self) -> None:
        run = self._run
        if run is None or self._is_new or self._announcements is None:
            run = self._run_in_current_life()
        session_task, announcements = self._session_task, self._announcements
        if self._has_stepped and session_task is not None and announcements is not None:
            decided, self._decided = self._decided, False
            ahead = self.dispatcher.fetch_ahead
            # Rows of a tick whose step has failed. The entries stay in the queues, and a later fetch reads them again.
            ahead.rows = []
            # Notifications that arrive during the tick wait until the rows of its fetch are used. If one of another
            # leader were noted before, these rows would hide that its queue has grown again.
            if (found := session_task.lead(run, announcements, decided=decided, after=ahead)) is not None:
                self._note_grown(found)
        now = time.monotonic()
        grown, self._grown = self._grown, set()
        if grown is None or now - self._polled_at >= self._poll_seconds:
            grown, self._polled_at = None, now
        self.dispatcher.step(run, grown)
        self._has_stepped = True

    def _wait(self, longest: float) -> None:
        """Wait until a wake-up or a notification arrives, or until work is due."""
        # Without LISTEN this process would lead too slowly, so it leaves the lead to another process.
        session_task = self._session_task if self._announcements is not None else None
        if session_task is not None:
            longest = 0.0 if self._decided else min(longest, session_task.wait_seconds())
        seconds = self.dispatcher.wait_seconds(max(0.0, longest))
        if self._announcements is None or (session_task is not None and session_task.is_gathering):
            self.wake_up.wait(seconds)
        elif arrived := self._announcements.wait(seconds, self.wake_up.socket):
            self._note_announcements(arrived)
        self.wake_up.clear()

    def _note_announcements(self, arrived: Mapping[str, Collection[str]]) -> None:
        schema = self._database.schema
        if Channel.SHARED.name_in(schema) in arrived:
            self._ownership.wake_coordinator()
        self._decided |= Channel.DECIDED.name_in(schema) in arrived
        for queue_ids in arrived.get(Channel.QUEUED.name_in(schema), ()):
            self._note_grown(queue_ids)

    def _note_grown(self, queue_ids: str) -> None:
        # Any database session may send a notification. If its payload is not a list of ids, look at all queues.
        if self._grown is None or not queue_ids.replace(" ", "").isdecimal():
            self._grown = None
        else:
            self._grown.update(map(int, queue_ids.split()))

    def _run_in_current_life(self) -> Executor:
        """Return the connection. If the server has begun a new life, first make the dispatcher drop its older data."""
        run = self._connected()
        # Behind a pooler there is no LISTEN, and a connection may stay open when the server restarts. So read the life
        # of the server at each call of this method.
        if self._is_new or self._announcements is None:
            self.dispatcher.enter_life(lives.current(run))
            self._is_new = False
        return run

    def _lent(self) -> BrokerConnection | None:
        """Return the connection that the coordinator may use while this thread waits for it."""
        connection = self._run.connection if self._run is not None else None
        return connection if isinstance(connection, BrokerConnection) else None

    def _connected(self) -> Executor:
        """Return the connection of the dispatching thread.

        The connection listens for notifications unless a pooler is in between.
        """
        if self._run is None:
            connection = self._database.connect(name="outbox-consumer", direct=True)
            run = Executor(connection, self._database.schema)
            listening = timeouts.lasts(connection)
            self._poll_seconds = _LISTENING_POLL_SECONDS if listening else _POLL_SECONDS
            try:
                # While no message is published, this database session is idle for seconds, so the session must have no
                # timeout that ends an idle session.
                if timeouts.lift_where_direct(connection):
                    # If a table stays locked, the lock timeout ends the waiting statement. After this lock timeout, the
                    # process logs the error and connects again.
                    timeouts.limit_locks_for_session(connection)
                if listening:
                    queued = Channel.QUEUED.name_in(run.schema)
                    announcements = Announcements(connection, without_own=queued)
                    listen(run, Channel.QUEUED, Channel.SHARED)
                    self._announcements = announcements
                    if self._session_task is not None:
                        self._session_task.begin(run, self._instance)
            except BaseException:
                connection.close()
                raise
            # The notifications that were sent while there was no connection are lost, so any queue may have grown.
            self._grown = None
            self._run = run
            self._is_new = True
        return self._run

    def _disconnect(self) -> None:
        run, self._run, self._announcements = self._run, None, None
        self._has_stepped = False
        if self._session_task is not None:
            if run is not None and not run.connection.closed:
                with contextlib.suppress(psycopg.Error):
                    self._session_task.end(run)
            self._session_task.interrupted()
        if run is not None:
            run.connection.close()


def _running_calls(instance: uuid.UUID, groups: Sequence[ConsumingGroup]) -> RunningCalls | None:
    subscriptions = [subscribed.subscription for group in groups for subscribed in group.subscribed.values()]
    # The file needs a slot for each thread and for each hanging call. The process ends as soon as the number of hanging
    # calls is above the limit, so the file has one slot more than the limit.
    calls = sum(subscription.threads * (1 + STUCK_LIMIT) + 1 for subscription in subscriptions)
    try:
        return running_calls.inherited(instance, calls=calls, batch=max(one.batch for one in subscriptions))
    except OSError as error:
        logger.warning("this process cannot note its calls, so a message that kills it cannot be found: %s", error)
        return None


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


# -- the runtime -----------------------------------------------------------------------------------


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
        self.database = database
        self.invoker = invoker
        self.codecs = codecs or Codecs()
        self.lease_seconds = lease_seconds
        self.share = share
        self.sharing_calls = sharing_calls if share is not None else 1
        self.threads = threads
        self.claim = claim
        self.claims_seconds = claims_seconds
        self._subscriptions = list(subscriptions)
        self._session_task = session_task
        groups = sorted({subscription.group for subscription, _ in subscriptions})
        self.note = FailureNote(database, ProcessPart.CONSUMING, of=", ".join(groups))

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
                    self.note.failed(error, is_last=True)
                    raise
                failures += 1
                self.note.failed(error)
                heartbeat.beat(ready=False)
                logger.warning("consuming cannot begin yet, trying again: %s", error)
                stop.wait(RECONNECT.pause_seconds(failures))
            except InconsistentSubscription as error:
                failures += 1
                now = time.monotonic()
                inconsistent_since = now if inconsistent_since is None else inconsistent_since
                if now - inconsistent_since >= INCONSISTENT_SECONDS:
                    self.note.failed(error)
                heartbeat.beat(ready=True)
                logger.warning("consuming waits for the end of other processes: %s", error)
                stop.wait(RECONNECT.pause_seconds(failures))
            except OutboxError as error:
                self.note.failed(error, is_last=True)
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
        self.note.worked()
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
            with naming("consuming", self.database.schema):
                session.begin_pass()
                session.loop(until=lambda: session.dispatcher.is_idle, patient=False)
        finally:
            session.finish()
        counts = session.dispatcher.counts
        return ConsumeCounts(**{name: counts[name] for name in ConsumeCounts.__dataclass_fields__})

    def _session(
        self, session_task: SessionTask | None = None, noted_in: RunningCalls | None = None
    ) -> ConsumerSession:
        with naming("the registration of consumers", self.database.schema):
            return ConsumerSession(self, session_task, noted_in)

    def register(self, run: Executor, instance: uuid.UUID) -> list[ConsumingGroup]:
        install.check_schema(run.connection, run.schema)
        members.release_the_ended(run)
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
