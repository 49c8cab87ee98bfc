"""One membership of a process in its groups: the connection, the loop around the dispatcher, and the end."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Final, Protocol

import psycopg

from outbox.broker.consumer.coordinator import Coordinator
from outbox.broker.consumer.wake_up import WakeUp
from outbox.broker.database import timeouts
from outbox.broker.database.connection import BrokerDatabase
from outbox.broker.database.executor import Executor
from outbox.broker.database.notify import RECONNECT, Announcements, Channel, listen
from outbox.broker.dispatch import running_calls
from outbox.broker.dispatch.dispatcher import Dispatcher
from outbox.broker.dispatch.invocation import Caller
from outbox.broker.dispatch.ownership import Ownership
from outbox.broker.dispatch.running_calls import RunningCalls
from outbox.broker.dispatch.subscriptions import ConsumingGroup
from outbox.broker.dispatch.work import HandlerCall
from outbox.broker.dispatch.worker_pool import STUCK_LIMIT
from outbox.broker.groups import lives
from outbox.broker.groups.rebalance import Strategy
from outbox.broker.log.failing import FailureNote
from outbox.codec import Codecs
from outbox.errors import BrokerUnavailable
from outbox.ports import Invoker
from outbox.utils import heartbeat

logger = logging.getLogger(__name__)

# The interval of looking at the queues without a notification: with LISTEN, and without it.
_LISTENING_POLL_SECONDS: Final = 3.0
_POLL_SECONDS: Final = 1.0
_THREADS_SECONDS: Final = 2.0


class SessionTask(Protocol):
    """Further work of a consumer process: in its dispatching thread, on that thread's listening connection."""

    def begin(self, run: Executor, instance: uuid.UUID) -> None:
        """Start on a new connection."""

    def turn(self, run: Executor, announcements: Announcements, *, decided: bool) -> bool:
        """Do the due work, bounded; returns whether queues have grown. `decided`: Channel.DECIDED was announced.

        Raises only psycopg.Error, when the connection is lost.
        """

    def wait_seconds(self) -> float:
        """Return how long no work is due without a notification."""

    @property
    def is_gathering(self) -> bool:
        """Whether the caller should wait a moment before it reads notifications."""

    def interrupted(self) -> None:
        """Note that the connection is lost."""

    def end(self, run: Executor) -> None:
        """Let another process continue at once: this one stops, or gives up its connection. Raises psycopg.Error."""


Register = Callable[[Executor, uuid.UUID], list[ConsumingGroup]]


class ConsumerSession:
    """Registers on creation; raises psycopg.Error, BrokerUnavailable, or the errors of `register`.

    `noted_in`: the file in which an earlier session of this process noted its calls. Its parent gave it only one file.
    """

    def __init__(
        self,
        database: BrokerDatabase,
        register: Register,
        *,
        invoker: Invoker,
        codecs: Codecs,
        lease_seconds: float,
        strategy: Strategy | Collection[int],
        note: FailureNote,
        session_task: SessionTask | None = None,
        noted_in: RunningCalls | None = None,
    ) -> None:
        self._database = database
        self._note = note
        self._lease_seconds = lease_seconds
        self._poll_seconds = _POLL_SECONDS
        self.wake_up = WakeUp()
        self._run: Executor | None = None
        self._announcements: Announcements | None = None
        self._polled_at = 0.0
        # The ids of the queues that have grown; None if it may be any queue.
        self._grown: set[int] | None = None
        self._is_new = True
        self._decided = False
        # On this connection. Until then it is unknown whether consuming works here, so another process may lead.
        self._has_stepped = False
        self._session_task = session_task
        self._instance = instance = uuid.uuid4()
        try:
            groups = register(self._connected(), instance)
        except BaseException:
            self._disconnect()
            self.wake_up.close()
            raise
        self._ownership = Ownership(self.wake_up.set)
        self.coordinator = Coordinator(
            database, instance, groups, self._ownership, lease_seconds=lease_seconds, strategy=strategy
        )
        self.running_calls = noted_in or _running_calls(instance, groups)
        if noted_in is not None:
            noted_in.go_on_as(instance)
        caller = Caller(invoker, codecs, self._finished, self.running_calls)
        self.dispatcher = Dispatcher(instance, groups, self._ownership, caller.run)

    @property
    def is_outdated(self) -> bool:
        """Whether a new session is needed: the broker was restored to a time before this one registered."""
        return self._ownership.is_outdated

    def bound(self) -> None:
        """From now on, fetch only the messages that are in the queues now."""
        self.dispatcher.bound(self._run_in_current_life())

    def loop(self, until: Callable[[], bool], *, patient: bool = True) -> None:
        """Step and wait until `until` is true after a step. If `patient`, wait for the database after an error."""
        failures = 0
        while True:
            try:
                self._step()
                heartbeat.beat(ready=True)
                self._note.worked()
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
                failures += 1
                heartbeat.beat(ready=False)
                self._note.failed(error)
                pause = RECONNECT.pause_seconds(failures)
                logger.warning("consuming is interrupted, trying again in %.1f s: %s", pause, error)
                self.wake_up.wait(pause)
                self.wake_up.clear()

    def finish(self) -> None:
        """Drain: let running handlers finish (at most their timeout), store, release the leases, leave the groups."""
        session_task, self._session_task = self._session_task, None
        if session_task is not None and self._run is not None:
            with contextlib.suppress(psycopg.Error):
                session_task.end(self._run)
        self.dispatcher.drain()
        give_up_at = time.monotonic() + self._lease_seconds

        def over() -> bool:
            # Without a database nothing can be stored: the leases will expire.
            lost = self._run is None and time.monotonic() > give_up_at
            return self.dispatcher.is_drained or (lost and not self.dispatcher.is_running)

        self.loop(until=over)
        self.coordinator.stop()
        self.dispatcher.stop_threads(within_seconds=_THREADS_SECONDS)
        self._disconnect()
        self.wake_up.close()

    def _finished(self, work: HandlerCall) -> None:
        if self.dispatcher.finished(work):
            self.wake_up.set()

    def _step(self) -> None:
        run = self._run_in_current_life()
        if self._has_stepped:
            self._accompany(run)
        now = time.monotonic()
        grown, self._grown = self._grown, set()
        if grown is None or now - self._polled_at >= self._poll_seconds:
            grown, self._polled_at = None, now
        self.dispatcher.step(run, grown)
        self._has_stepped = True

    def _accompany(self, run: Executor) -> None:
        if self._session_task is None or self._announcements is None:
            return
        decided, self._decided = self._decided, False
        if self._session_task.turn(run, self._announcements, decided=decided):
            # Its own notifications came with its answer, unless that was refused.
            arrived = self._announcements.wait(0)
            if Channel.QUEUED.name_in(self._database.schema) not in arrived:
                self._grown = None
            self._note_announcements(arrived)

    def _wait(self, longest: float) -> None:
        """Wait until a wake-up or a notification arrives, or work is due."""
        # Without LISTEN this process would lead too slowly, so it does not lead: another process does.
        session_task = self._session_task if self._announcements is not None else None
        if session_task is not None:
            longest = 0.0 if self._decided else min(longest, session_task.wait_seconds())
        seconds = self.dispatcher.wait_seconds(max(0.0, longest))
        if self._announcements is None or (session_task is not None and session_task.is_gathering):
            self.wake_up.wait(seconds)
        else:
            self._note_announcements(self._announcements.wait(seconds, self.wake_up.socket))
        self.wake_up.clear()

    def _note_announcements(self, arrived: Mapping[str, Collection[str]]) -> None:
        schema = self._database.schema
        if Channel.SHARED.name_in(schema) in arrived:
            self._ownership.wake_coordinator()
        self._decided |= Channel.DECIDED.name_in(schema) in arrived
        for queue_ids in arrived.get(Channel.QUEUED.name_in(schema), ()):
            # Any session may notify: ignore a payload that is not a list of ids.
            if self._grown is None or not queue_ids.replace(" ", "").isdecimal():
                self._grown = None
            else:
                self._grown.update(map(int, queue_ids.split()))

    def _run_in_current_life(self) -> Executor:
        """Return the connection, after the dispatcher has dropped its data from another life of the server."""
        run = self._connected()
        # Behind a pooler, where LISTEN is off, a connection may outlive its server.
        if self._is_new or self._announcements is None:
            self.dispatcher.enter_life(lives.current(run))
            self._is_new = False
        return run

    def _connected(self) -> Executor:
        """Return the dispatching thread's connection; it listens unless a pooler is in between."""
        if self._run is None:
            connection = self._database.connect(name="outbox-consumer", direct=True)
            listening = timeouts.lasts(connection)
            self._poll_seconds = _LISTENING_POLL_SECONDS if listening else _POLL_SECONDS
            try:
                # The session idles for seconds when nothing is published; a timeout must not end it.
                if timeouts.lift_where_direct(connection):
                    # A table that stays locked is reported, and the connection is made again.
                    timeouts.limit_locks_for_session(connection)
                if listening:
                    announcements = Announcements(connection)
                    listen(Executor(connection, self._database.schema), Channel.QUEUED, Channel.SHARED)
                    self._announcements = announcements
                    if self._session_task is not None:
                        self._session_task.begin(Executor(connection, self._database.schema), self._instance)
            except BaseException:
                connection.close()
                raise
            # Notifications from the time without a connection are lost.
            self._grown = None
            self._run = Executor(connection, self._database.schema)
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
    # Slots for the threads and for hanging calls, of which there is one more than the limit at the end.
    calls = sum(subscription.threads * (1 + STUCK_LIMIT) + 1 for subscription in subscriptions)
    try:
        return running_calls.inherited(instance, calls=calls, batch=max(one.batch for one in subscriptions))
    except OSError as error:
        logger.warning("a message that kills this process stays unknown, its calls cannot be noted: %s", error)
        return None


@contextlib.contextmanager
def woken_by(stop: threading.Event, wake_up: WakeUp) -> Iterator[None]:
    """Wake the thread when `stop` is set: a thread cannot wait for an event and a socket at once."""
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
