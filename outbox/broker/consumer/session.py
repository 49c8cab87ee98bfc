"""One stay of a process in its consumer groups: the connection, the loop around the dispatcher, and the way out."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Final, Protocol

import psycopg

from outbox import heartbeat
from outbox.broker.consumer.bell import WakeUp
from outbox.broker.consumer.coordinator import Coordinator
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

logger = logging.getLogger(__name__)

# How often queues are looked at though nobody has announced anything: where announcements come, and where they do not.
_LISTENING_POLL_SECONDS: Final = 3.0
_POLL_SECONDS: Final = 1.0
_THREADS_SECONDS: Final = 2.0


class SessionTask(Protocol):
    """What a process does beside consuming: in its dispatching thread, on the connection on which that listens."""

    def begin(self, run: Executor, instance: uuid.UUID) -> None:
        """The connection is a new one."""

    def turn(self, run: Executor, announcements: Announcements, *, decided: bool) -> bool:
        """Do what is due, bounded; whether queues have grown by it. `decided`: Channel.DECIDED was announced.

        Raises psycopg.Error where the connection is gone, and nothing else.
        """

    def wait_seconds(self) -> float:
        """How long nothing is due unless something is announced."""

    @property
    def is_gathering(self) -> bool:
        """Whether announcements had better wait for a moment."""

    def interrupted(self) -> None:
        """The connection is gone."""

    def end(self, run: Executor) -> None:
        """Let others go on with it, at once: the process stops, or its connection is given up. Raises psycopg.Error."""


Register = Callable[[Executor, uuid.UUID], list[ConsumingGroup]]


class ConsumerSession:
    """Registers on creation; raises psycopg.Error, BrokerUnavailable, or what `register` raises.

    `noted_in`: where an earlier stay of this process noted its calls; its parent gave it one file only.
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
        companion: SessionTask | None = None,
        noted_in: RunningCalls | None = None,
    ) -> None:
        self._database = database
        self._note = note
        self._lease_seconds = lease_seconds
        self._poll_seconds = _POLL_SECONDS
        self.bell = WakeUp()
        self._run: Executor | None = None
        self._announcements: Announcements | None = None
        self._polled_at = 0.0
        # Of the queues that have grown the ids; None where it may be any.
        self._grown: set[int] | None = None
        self._is_new = True
        self._decided = False
        # On this connection. Before that it is not known whether consuming works, and others may lead.
        self._has_stepped = False
        self._companion = companion
        self._instance = instance = uuid.uuid4()
        try:
            groups = register(self._connected(), instance)
        except BaseException:
            self._disconnect()
            self.bell.close()
            raise
        self._ownership = Ownership(self.bell.ring)
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
        """Whether this stay has to end and another has to begin: the broker was restored to before it registered."""
        return self._ownership.is_outdated

    def bound(self) -> None:
        """From now on fetch only what the queues hold now."""
        self.dispatcher.bound(self._living())

    def loop(self, until: Callable[[], bool], *, patient: bool = True) -> None:
        """Step and wait until `until` says so after a step. Errors of the database are waited out when `patient`."""
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
                self.bell.wait(pause)
                self.bell.answer()

    def finish(self) -> None:
        """Drain: finish what runs (at most its timeout), store, release the leases, leave the groups."""
        companion, self._companion = self._companion, None
        if companion is not None and self._run is not None:
            with contextlib.suppress(psycopg.Error):
                companion.end(self._run)
        self.dispatcher.drain()
        give_up_at = time.monotonic() + self._lease_seconds

        def over() -> bool:
            # Without a database there is nothing to store into: the leases will run out.
            lost = self._run is None and time.monotonic() > give_up_at
            return self.dispatcher.is_drained or (lost and not self.dispatcher.is_running)

        self.loop(until=over)
        self.coordinator.stop()
        self.dispatcher.stop_threads(within_seconds=_THREADS_SECONDS)
        self._disconnect()
        self.bell.close()

    def _finished(self, work: HandlerCall) -> None:
        if self.dispatcher.finished(work):
            self.bell.ring()

    def _step(self) -> None:
        run = self._living()
        if self._has_stepped:
            self._accompany(run)
        now = time.monotonic()
        grown, self._grown = self._grown, set()
        if grown is None or now - self._polled_at >= self._poll_seconds:
            grown, self._polled_at = None, now
        self.dispatcher.step(run, grown)
        self._has_stepped = True

    def _accompany(self, run: Executor) -> None:
        if self._companion is None or self._announcements is None:
            return
        decided, self._decided = self._decided, False
        if self._companion.turn(run, self._announcements, decided=decided):
            # What it has announced came with its answer, unless that was refused.
            arrived = self._announcements.wait(0)
            if Channel.QUEUED.name_in(self._database.schema) not in arrived:
                self._grown = None
            self._hear(arrived)

    def _wait(self, longest: float) -> None:
        """Until somebody rings or announces, or something is due."""
        # Without LISTEN it would be late, so it does nothing: another process does its work.
        companion = self._companion if self._announcements is not None else None
        if companion is not None:
            longest = 0.0 if self._decided else min(longest, companion.wait_seconds())
        seconds = self.dispatcher.wait_seconds(max(0.0, longest))
        if self._announcements is None or (companion is not None and companion.is_gathering):
            self.bell.wait(seconds)
        else:
            self._hear(self._announcements.wait(seconds, self.bell.socket))
        self.bell.answer()

    def _hear(self, arrived: Mapping[str, Collection[str]]) -> None:
        schema = self._database.schema
        if Channel.SHARED.name_in(schema) in arrived:
            self._ownership.wake_coordinator()
        self._decided |= Channel.DECIDED.name_in(schema) in arrived
        for queue_ids in arrived.get(Channel.QUEUED.name_in(schema), ()):
            # Anybody may notify: what is no list of ids names no queues.
            if self._grown is None or not queue_ids.replace(" ", "").isdecimal():
                self._grown = None
            else:
                self._grown.update(map(int, queue_ids.split()))

    def _living(self) -> Executor:
        """The connection, once the dispatcher has forgotten what it has from another life of the server."""
        run = self._connected()
        # Behind a pooler, where LISTEN is off, a connection outlives its server.
        if self._is_new or self._announcements is None:
            self.dispatcher.live(lives.current(run))
            self._is_new = False
        return run

    def _connected(self) -> Executor:
        """The connection for everything the dispatching thread does; it listens unless a pooler is in between."""
        if self._run is None:
            connection = self._database.connect(name="outbox-consumer", direct=True)
            listening = timeouts.lasts(connection)
            self._poll_seconds = _LISTENING_POLL_SECONDS if listening else _POLL_SECONDS
            try:
                # It idles for seconds where nothing is published, and must not be ended for that.
                timeouts.lift_where_direct(connection)
                if listening:
                    announcements = Announcements(connection)
                    listen(Executor(connection, self._database.schema), Channel.QUEUED, Channel.SHARED)
                    self._announcements = announcements
                    if self._companion is not None:
                        self._companion.begin(Executor(connection, self._database.schema), self._instance)
            except BaseException:
                connection.close()
                raise
            # What was announced meanwhile is lost.
            self._grown = None
            self._run = Executor(connection, self._database.schema)
            self._is_new = True
        return self._run

    def _disconnect(self) -> None:
        run, self._run, self._announcements = self._run, None, None
        self._has_stepped = False
        if self._companion is not None:
            if run is not None and not run.connection.closed:
                with contextlib.suppress(psycopg.Error):
                    self._companion.end(run)
            self._companion.interrupted()
        if run is not None:
            run.connection.close()


def _running_calls(instance: uuid.UUID, groups: Sequence[ConsumingGroup]) -> RunningCalls | None:
    subscriptions = [subscribed.subscription for group in groups for subscribed in group.subscribed.values()]
    # Beside the threads those that hang, of which there is one more than the limit at the end.
    calls = sum(subscription.threads * (1 + STUCK_LIMIT) + 1 for subscription in subscriptions)
    try:
        return running_calls.inherited(instance, calls=calls, batch=max(one.batch for one in subscriptions))
    except OSError as error:
        logger.warning("a message that kills this process will not be found out, its calls cannot be noted: %s", error)
        return None


@contextlib.contextmanager
def ringing(stop: threading.Event, bell: WakeUp) -> Iterator[None]:
    """Ring when `stop` is set: nobody can wait for an event and a socket at once."""
    ended = threading.Event()

    def watch() -> None:
        stop.wait()
        if not ended.is_set():
            bell.ring()

    thread = threading.Thread(target=watch, name="outbox-stop", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
