"""Leading from a consumer's process: it ticks on the session on which it then fetches what the tick has queued.

From commit to handler that is a process, an announcement and two cold sessions less. A worker with one consumer process
does it so; the broker's process beside it stands in while this one does not lead (docs/decisions/163).
"""

from __future__ import annotations

import logging
import time
from typing import Final
from uuid import UUID

import psycopg

from outbox.backoff import Backoff
from outbox.broker.database import timeouts
from outbox.broker.database.connection import BrokerDatabase
from outbox.broker.database.executor import Executor
from outbox.broker.database.notify import Announcements, Channel, listen, unlisten
from outbox.broker.log.failing import FailureNote, ProcessPart
from outbox.broker.process import ProcessSettings, gathers, idle_seconds, leaders_loops, tick
from outbox.broker.sequencer.leader import LeaderLease
from outbox.broker.sequencer.sequencer import Sequencer
from outbox.errors import OutboxError
from outbox.periodic import BackgroundLoop

logger = logging.getLogger(__name__)

# Meanwhile somebody else leads: whoever stands in for this process.
_REST: Final = Backoff(first_seconds=1.0, longest_seconds=30.0, healthy_seconds=10.0)


class LeadingConsumer:
    """What consumer.session.Companion is for. Never ends consuming: what goes wrong here is logged, and it rests."""

    def __init__(self, database: BrokerDatabase, *, settings: ProcessSettings | None = None) -> None:
        self._database = database
        self._settings = settings or ProcessSettings()
        self._decided_channel = Channel.DECIDED.name_in(database.schema)
        self._note = FailureNote(database, ProcessPart.SEQUENCING)
        self._loops: list[BackgroundLoop] = []
        self._leads = False
        self._decided = False
        # When to act next if nothing is announced; until when more announcements are gathered, or a failure rests.
        self._look_at = 0.0
        self._gathers_until = 0.0
        self._rests_until = 0.0
        self._failures = 0
        self._led_at = 0.0

    def begin(self, run: Executor, instance: UUID) -> None:
        """On each new connection, which listens: anything read on another one is forgotten."""
        timeouts.lift_for_session(run.connection)
        settings = self._settings
        self._lease = LeaderLease(run.schema, instance, term_seconds=settings.lease_term_seconds)
        self._sequencer = Sequencer(self._database, instance, check=settings.check)
        self._look_at = self._gathers_until = 0.0

    def turn(self, run: Executor, announcements: Announcements, *, decided: bool) -> bool:
        """Tick if this process leads and it is time to; whether queues have grown. `decided`: something may be new.

        Raises psycopg.Error when the connection is gone.
        """
        now = time.monotonic()
        self._decided |= decided
        if now < self._act_at():
            return False
        self._decided = False
        try:
            return self._lead(run, announcements, now)
        except Exception as error:
            pause = self._rest()
            self._note.failed(error)
            if run.connection.closed:
                raise psycopg.OperationalError(f"the connection ended while it sequenced: {error}") from error
            self._give_up(run, error, pause)
            return False

    def wait_seconds(self) -> float:
        """How long there is nothing to do here unless something is announced."""
        return max(0.0, self._act_at() - time.monotonic())

    @property
    def is_gathering(self) -> bool:
        """Whether announcements had better wait for a moment."""
        return time.monotonic() < self._gathers_until

    def interrupted(self) -> None:
        """The connection is gone."""
        self._leads = False
        while self._loops:
            self._loops.pop().stop()

    def end(self, run: Executor) -> None:
        """Let others lead, at once. Raises psycopg.Error."""
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
        logger.info("leading the broker in schema %r beside consuming", run.schema)
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

    def _rest(self) -> float:
        """Also on the next connection: to break one after another would end consuming. For so many seconds."""
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
            "sequencing beside consuming is interrupted, trying again in %.1f s: %s",
            pause,
            str(error).strip() or type(error).__name__,
            exc_info=None if expected else error,
        )
