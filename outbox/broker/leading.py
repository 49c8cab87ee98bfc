"""Lead from a consumer process: it ticks on the session on which it then fetches the queued messages.

Compared with a separate broker process, the way from commit to handler has one process, one notification and two cold
sessions less. A worker with one consumer process leads like this. Its broker process stands in while the consumer does
not lead (docs/decisions/163).
"""

from __future__ import annotations

import logging
import time
from typing import Final
from uuid import UUID

import psycopg

from outbox.broker.database import timeouts
from outbox.broker.database.connection import BrokerDatabase
from outbox.broker.database.executor import Executor
from outbox.broker.database.notify import Announcements, Channel, listen, unlisten
from outbox.broker.log.failing import FailureNote, ProcessPart
from outbox.broker.process import ProcessSettings, gathers, idle_seconds, leaders_loops, tick
from outbox.broker.sequencer.leader import LeaderLease
from outbox.broker.sequencer.sequencer import Sequencer
from outbox.errors import OutboxError
from outbox.utils.backoff import Backoff
from outbox.utils.periodic import BackgroundLoop

logger = logging.getLogger(__name__)

# Meanwhile another process leads: the stand-in for this one.
_REST: Final = Backoff(first_seconds=1.0, longest_seconds=30.0, healthy_seconds=10.0)


class LeadingConsumer:
    """The SessionTask that leads. It never ends consuming: it logs its failures and pauses."""

    def __init__(self, database: BrokerDatabase, *, settings: ProcessSettings | None = None) -> None:
        self._database = database
        self._settings = settings or ProcessSettings()
        self._decided_channel = Channel.DECIDED.name_in(database.schema)
        self._note = FailureNote(database, ProcessPart.SEQUENCING)
        self._loops: list[BackgroundLoop] = []
        self._leads = False
        self._decided = False
        # The time of the next action without a notification; the time until which it gathers notifications, or pauses.
        self._look_at = 0.0
        self._gathers_until = 0.0
        self._rests_until = 0.0
        self._failures = 0
        self._led_at = 0.0

    def begin(self, run: Executor, instance: UUID) -> None:
        """Start on a new, listening connection: forget everything read on another one."""
        timeouts.lift_for_session(run.connection)
        settings = self._settings
        self._lease = LeaderLease(run.schema, instance, term_seconds=settings.lease_term_seconds)
        self._sequencer = Sequencer(self._database, instance, check=settings.check)
        self._look_at = self._gathers_until = 0.0

    def turn(self, run: Executor, announcements: Announcements, *, decided: bool) -> bool:
        """Tick if this process leads and a tick is due; returns whether queues have grown.

        `decided`: there may be new decisions. Raises psycopg.Error when the connection is lost.
        """
        now = time.monotonic()
        self._decided |= decided
        if now < self._act_at():
            return False
        self._decided = False
        try:
            return self._lead(run, announcements, now)
        except Exception as error:
            pause = self._pause_seconds()
            self._note.failed(error)
            if run.connection.closed:
                raise psycopg.OperationalError(f"the connection ended while it sequenced: {error}") from error
            self._give_up(run, error, pause)
            return False

    def wait_seconds(self) -> float:
        """Return how long there is no work here without a notification."""
        return max(0.0, self._act_at() - time.monotonic())

    @property
    def is_gathering(self) -> bool:
        """Whether the caller should wait a moment before it reads notifications."""
        return time.monotonic() < self._gathers_until

    def interrupted(self) -> None:
        """Note that the connection is lost."""
        self._leads = False
        while self._loops:
            self._loops.pop().stop()

    def end(self, run: Executor) -> None:
        """Let another process lead at once. Raises psycopg.Error."""
        if self._leads:
            self.interrupted()
            self._lease.release(run.connection)
        self._note.worked()

    def _act_at(self) -> float:
        return max(self._rests_until, self._gathers_until if self._decided else self._look_at)

    def _lead(self, run: Executor, announcements: Announcements, now: float) -> bool:
        remaining = self._lease.hold(run.connection)
        if remaining:
            self._note.worked()
            self._follow(run)
            self._look_at = now + min(remaining, self._settings.poll_seconds)
            return False
        if not self._leads:
            self._take_the_lead(run, now)
        counts = tick(run, self._lease, self._sequencer)
        if not counts.collided:
            self._note.worked()
        self._look_at = now if counts.more else now + idle_seconds(counts, self._settings)
        if gathers(counts) and announcements.pending(self._decided_channel):
            self._decided, self._gathers_until = True, now + self._settings.pace_seconds
        return counts.appended > 0

    def _take_the_lead(self, run: Executor, now: float) -> None:
        logger.info("leading the broker in schema %r, in a consumer process", run.schema)
        listen(run, Channel.DECIDED)
        self._loops = leaders_loops(self._database, self._settings)
        for loop in self._loops:
            loop.start()
        self._leads, self._led_at = True, now

    def _follow(self, run: Executor) -> None:
        if self._leads:
            logger.warning("another process leads now")
            self.interrupted()
            unlisten(run, Channel.DECIDED)

    def _pause_seconds(self) -> float:
        """Pause for `seconds`, also on the next connection:

        failing on one connection after another would end consuming.
        """
        now = time.monotonic()
        self._failures = _REST.failures_in_a_row(self._failures, ran_seconds=now - self._led_at if self._leads else 0.0)
        pause = _REST.pause_seconds(self._failures)
        self._rests_until = now + pause
        return pause

    def _give_up(self, run: Executor, error: Exception, pause: float) -> None:
        self.interrupted()
        try:
            unlisten(run, Channel.DECIDED)
            self._lease.release(run.connection)
        except psycopg.Error as further:
            logger.debug("the lead was not released: %s", further)
        expected = isinstance(error, psycopg.Error | OutboxError)
        logger.warning(
            "sequencing in a consumer process is interrupted, trying again in %.1f s: %s",
            pause,
            str(error).strip() or type(error).__name__,
            exc_info=None if expected else error,
        )
