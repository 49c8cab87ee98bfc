"""The leader loop: acquire the leader lease, make ticks, run the background work, and release the lease.

The broker process runs this loop on its own connection (outbox/broker/process.py). If a worker has only one consumer
process, that process leads (`LeadingConsumer`). This consumer process makes the ticks and fetches the queued messages
on the same database session. With a separate broker process, a message on its way from commit to handler would need one
more process, one more notification and two more database sessions. The broker process of a worker with one consumer
process is a stand-in: it leads while the consumer process does not lead (docs/decisions/163).
"""

from __future__ import annotations

import logging
import math
import time
from dataclasses import dataclass, field
from typing import Final, Protocol
from uuid import UUID

import psycopg

from outbox import hooks
from outbox.broker.database import timeouts
from outbox.broker.database.connection import BrokerDatabase
from outbox.broker.database.executor import Executor
from outbox.broker.database.notify import Announcements, Channel, listen, unlisten
from outbox.broker.database.sender import AfterTick
from outbox.broker.log.failing import FailureNote, ProcessPart
from outbox.broker.maintenance.service import maintenance
from outbox.broker.operations.summary import COUNT_SECONDS, summaries
from outbox.broker.sequencer.leader import DEFAULT_TERM_SECONDS, LeaderLease
from outbox.broker.sequencer.sequencer import Sequencer, TickCounts
from outbox.errors import OutboxError
from outbox.transaction import CheckSettings
from outbox.utils import measures
from outbox.utils.backoff import Backoff
from outbox.utils.periodic import BackgroundLoop
from outbox.utils.safe_text import class_name, printable, shown_text

logger = logging.getLogger(__name__)

# How long a consumer process does not lead after its tick has failed. During this pause, the broker process of the same
# worker leads.
_REST: Final = Backoff(first_seconds=1.0, longest_seconds=30.0, healthy_seconds=10.0)

# The leader measures the rate of messages over this time (seconds).
_LOAD_SECONDS: Final = 0.1
# The weight of the newest tick in the mean time of a tick.
_NEWEST: Final = 0.2
# How many messages arrive in the time of one tick. From the first number on, the leader waits between ticks. From the
# second number on, it waits for the whole pause.
_LOAD_BEGINS: Final = 1.0
_LOAD_IS_FULL: Final = 1.5
# The whole pause is the time of this number of ticks, but at most the time in which this number of messages arrives. In
# a tick of so many messages, a message costs nearly as little as in a larger tick.
_PAUSE_TICKS: Final = 5
_ENOUGH_MESSAGES: Final = 100


@dataclass(frozen=True, slots=True)
class LeaderSettings:
    """The settings of the leader loop. All times are in seconds.

    `poll_seconds` is the longest wait until a candidate queries the database again. `pace_seconds` is the longest time
    for which a leader under load waits for more decisions before the next tick. With `stands_in`, a candidate leads
    only while no consumer process leads.
    """

    lease_term_seconds: float = DEFAULT_TERM_SECONDS
    poll_seconds: float = 1.0
    pace_seconds: float = 0.02
    maintenance_seconds: float = 30.0
    summary_seconds: float = COUNT_SECONDS
    check: CheckSettings = field(default_factory=CheckSettings)
    stands_in: bool = False


class PartWork(Protocol):
    """What the leader does for a part (`hooks.add_leader_work`).

    `look` and `look_at` belong to the leader's thread. `look_at`: the time of the next look on the monotonic clock.
    """

    loop: BackgroundLoop
    look_at: float

    def look(self, run: Executor, now: float) -> None:
        """Wake the loop if something is due. `now`: the monotonic clock. Raises psycopg.Error."""


class Leader:
    """One candidate for the leader lease; while a candidate holds this lease, it is the leader.

    The caller owns the connection and repeats two steps: it calls `lead`, and then waits for `wait_seconds` or for a
    notification.
    """

    def __init__(self, database: BrokerDatabase, *, settings: LeaderSettings | None = None) -> None:
        self._database = database
        self._settings = settings or LeaderSettings()
        self._decided_channel = Channel.DECIDED.name_in(database.schema)
        self.note = FailureNote(database, ProcessPart.SEQUENCING)
        self._loops: list[BackgroundLoop] = []
        self._part_works: list[PartWork] = []
        self.leads = False
        self._decided = False
        # `_look_at`: the time at which `lead` has work again if no notification arrives. `_gathers_until`: the time
        # until which the leader waits for more decisions before the next tick. `_rests_until`: the time at which the
        # pause after a failure ends.
        self._look_at = 0.0
        self._gathers_until = 0.0
        self._load = Load()
        self._rests_until = 0.0
        self._led_at = 0.0

    def begin(self, run: Executor, instance: UUID) -> None:
        """Begin on a new connection, and forget all data that was read on an earlier connection."""
        self._listens = timeouts.lasts(run.connection)
        if self._listens:
            timeouts.lift_for_session(run.connection)
        else:
            timeouts.lift_where_direct(run.connection)
        settings = self._settings
        self._instance = instance
        self._lease = LeaderLease(
            run.schema, instance, term_seconds=settings.lease_term_seconds, stands_in=settings.stands_in
        )
        self._work_of_parts = [hooks.resolved(path) for path in hooks.leader_work.values()]
        self._sequencer = Sequencer(self._database, instance, check=settings.check)
        self._look_at = self._gathers_until = 0.0

    def lead(
        self, run: Executor, announcements: Announcements, *, decided: bool, after: AfterTick | None = None
    ) -> str | None:
        """Make a tick if this process leads and a tick is due. Return which queues have grown (`TickCounts.grown`).

        `decided` says that there may be new decisions. If so, the server executes `after` in the round trip of the
        tick. Raises the errors of the connection and of the database.
        """
        now = time.monotonic()
        self._decided |= decided
        if now < self._act_at():
            return None
        after = after if self._decided else None
        self._decided = False
        remaining = self._lease.hold(run.connection)
        if remaining:
            self.note.worked()
            self._follow(run)
            self._look_at = now + min(remaining, self._settings.poll_seconds)
            return None
        if not self.leads:
            self._take_the_lead(run, now)
        for work in self._part_works:
            if now >= work.look_at:
                work.look(run, now)
        # This tick reads the decisions that were announced until now.
        announcements.discard(self._decided_channel)
        counts, began, ended = self._tick(run, after)
        if not counts.collided:
            self.note.worked()
        self._look_at = now if counts.more else now + self._idle_seconds(counts)
        pause = self._load.pause_seconds(max(counts.decisions, counts.appended), began, ended - began)
        if pause and counts.decisions > 1 and not counts.more:
            self._decided, self._gathers_until = True, ended + min(pause, self._settings.pace_seconds)
        return counts.grown

    def wait_seconds(self) -> float:
        """Return how many seconds the caller may wait for a notification before it must call `lead` again."""
        return max(0.0, self._act_at() - time.monotonic())

    @property
    def is_gathering(self) -> bool:
        """Whether the leader delays the next tick to collect more decisions. If so, the caller waits before it reads
        notifications."""
        return time.monotonic() < self._gathers_until

    def interrupted(self, *, join: bool = False) -> None:
        """Note that the leader lease or the connection is lost, and stop the background work.

        If `join` is false, the method does not wait until the background work has ended, because this process may
        become leader again immediately.
        """
        self.leads = False
        loops, self._loops = self._loops, []
        for loop in loops:
            loop.stop()
        for loop in loops if join else []:
            loop.join()

    def end(self, run: Executor, *, join: bool = False) -> None:
        """Release the leader lease, so that another process can lead at once. Raises psycopg.Error."""
        if self.leads:
            self.interrupted(join=join)
            self._lease.release(run.connection)
        self.note.worked()

    def _act_at(self) -> float:
        return max(self._rests_until, self._gathers_until if self._decided else self._look_at)

    def _tick(self, run: Executor, after: AfterTick | None) -> tuple[TickCounts, float, float]:
        """Make one tick and record its duration. After a collision, check the leader lease again.

        Return the counts, and the times (time.monotonic) at which the tick began and ended.
        """
        began = time.monotonic()
        counts = self._sequencer.run_once(run.connection, after)
        ended = time.monotonic()
        if counts.collided:
            self._lease.ask_again()
        if counts.ticked and measures.recorder is not None:
            measures.recorder.ticked(ended - began, counts.appended)
        return counts, began, ended

    def _idle_seconds(self, counts: TickCounts) -> float:
        """Return the time in seconds from this tick to the next tick if no notification arrives."""
        waits = [self._settings.poll_seconds, self._settings.lease_term_seconds / 3]
        waits += [max(0.0, work.look_at - time.monotonic()) for work in self._part_works]
        if counts.next_due_seconds is not None:
            waits.append(max(0.0, counts.next_due_seconds))
        return min(waits)

    def _take_the_lead(self, run: Executor, now: float) -> None:
        logger.info("leading the broker in schema %r", run.schema)
        if self._listens:
            listen(run, Channel.DECIDED)
        settings = self._settings
        # A thread can be started once only, so each lead has new loops.
        self._part_works = [work(self._database) for work in self._work_of_parts]
        self._loops = [
            maintenance(self._database, settings.check, every_seconds=settings.maintenance_seconds),
            summaries(self._database, self._instance, every_seconds=settings.summary_seconds),
            *(work.loop for work in self._part_works),
        ]
        for loop in self._loops:
            loop.start()
        self.leads, self._led_at = True, now

    def _follow(self, run: Executor) -> None:
        if not self.leads:
            return
        if self._lease.stands_in:
            logger.info("another process leads now; this process stands in, and leads again only if none does")
        else:
            logger.warning("this process has lost the leader lease: another process leads now")
        self.interrupted()
        self._stop_listening(run)

    def _stop_listening(self, run: Executor) -> None:
        if self._listens:
            unlisten(run, Channel.DECIDED)


class LeadingConsumer(Leader):
    """The SessionTask with which a consumer process leads.

    After an error in `lead`, the object logs the error and does not lead during a pause. The process continues to
    consume.
    """

    _failures = 0

    def lead(
        self, run: Executor, announcements: Announcements, *, decided: bool, after: AfterTick | None = None
    ) -> str | None:
        """Do the same as `Leader.lead`, but raise only psycopg.Error, and only if the connection is lost."""
        try:
            return super().lead(run, announcements, decided=decided, after=after)
        except Exception as error:
            pause = self._rest()
            self.note.failed(error)
            if run.connection.closed:
                raise psycopg.OperationalError(
                    f"the connection ended while this process made a tick: {shown_text(error)}"
                ) from error
            self._give_up(run, error, pause)
            return None

    def _rest(self) -> float:
        """Set the pause after a failure, and return its length in seconds.

        The pause also applies to the next connection. Without a pause, one connection after another would fail, and the
        process could not consume.
        """
        now = time.monotonic()
        self._failures = _REST.failures_in_a_row(self._failures, ran_seconds=now - self._led_at if self.leads else 0.0)
        pause = _REST.pause_seconds(self._failures)
        self._rests_until = now + pause
        return pause

    def _give_up(self, run: Executor, error: Exception, pause: float) -> None:
        self.interrupted()
        try:
            self._stop_listening(run)
            self._lease.release(run.connection)
        except psycopg.Error as further:
            logger.debug("the leader lease was not released: %s", further)
        expected = isinstance(error, psycopg.Error | OutboxError)
        logger.warning(
            "sequencing in a consumer process is interrupted, trying again in %.1f s: %s",
            pause,
            shown_text(error) or class_name(error),
            exc_info=None if expected else printable(error),
        )


class Load:
    """The load of the leader, from which it computes how long it waits for more decisions before the next tick.

    Under load, the leader should wait, because one tick per message costs several times as much as one tick for several
    messages. Without load, it should not wait, because the wait would delay messages that arrive during a tick. The
    load is the number of messages that arrive in the time of one tick. So a leader on a slow or busy machine waits from
    a lower rate on, and for longer. Against a pause from a fixed rate on, the CPU behind the web process falls by 15 to
    60 %.
    """

    def __init__(self) -> None:
        self._messages = 0.0
        self._tick_seconds = 0.0
        self._at = 0.0

    def pause_seconds(self, messages: int, began: float, took: float) -> float:
        """Count a tick, and return how many seconds the leader should wait after it.

        `messages` is the number of messages of the tick, `began` the time (time.monotonic) at which it began, and
        `took` its duration in seconds.
        """
        self._messages = self._messages * math.exp((self._at - began) / _LOAD_SECONDS) + messages
        self._at = began
        if messages:
            self._tick_seconds += _NEWEST * (took - self._tick_seconds)
        per_second = self._messages / _LOAD_SECONDS
        load = per_second * self._tick_seconds
        if load <= _LOAD_BEGINS:
            return 0.0
        share = min(1.0, (load - _LOAD_BEGINS) / (_LOAD_IS_FULL - _LOAD_BEGINS))
        return share * min(_PAUSE_TICKS * self._tick_seconds, _ENOUGH_MESSAGES / per_second)
