"""Telling a poison message from a world that is away: identical errors in a row, of different messages.

A database or a service that is away fails every message, each after its own timeout, until the last one is in the dead
letters. So after three failures with the same error, of calls that share no message and without a success between
them, the subscription is taken to be in an **outage**: it pauses, its failed messages stay where they are and use up no
attempt, and after the pause one call at a time tries whether it is over. The first success ends it.

A few poison messages with nothing else to try look the same. Therefore an outage is believed only as long as one
message's own series of attempts would take; after that attempts count again, so that everything ends.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable
from typing import Final

from outbox.backoff import Backoff
from outbox.subscription import Subscription

_IN_A_ROW: Final = 3
_PAUSES: Final = Backoff(first_seconds=1.0, longest_seconds=60.0)


class Outage:
    """What is known of one subscription's failures in a row. Times are of time.monotonic; one thread uses it."""

    def __init__(self, subscription: Subscription) -> None:
        self._subscription = subscription
        self._error = ""
        # Calls that failed with it in a row, as what they were about; no two of them share a message.
        self._failed: list[frozenset[Hashable]] = []
        self._pauses = 0
        self._began = 0.0
        self._doubted = False
        # Whether the handler has said how long the pause is to be.
        self._asked = False
        self.resume_at: float | None = None

    @property
    def error(self) -> str:
        """The error it is about; '' while there is none."""
        return self._error if self.resume_at is not None else ""

    @property
    def pauses(self) -> int:
        """How often it has paused in this outage; 0 without one."""
        return self._pauses if self.resume_at is not None else 0

    def admits(self, now: float, *, running: bool) -> bool:
        """Whether a call may be started: always, but in an outage one at a time, after the pause."""
        return self.resume_at is None or (now >= self.resume_at and not running)

    def succeeded(self, now: float = math.inf) -> None:
        """A handler did its work: whatever failed before is the fault of what failed.

        But a pause that was asked for lasts as long as that: the call may have begun before it.
        """
        if self._asked and self.resume_at is not None and now < self.resume_at:
            return
        self._asked = False
        self._error = ""
        self._failed = []
        self._pauses = 0
        self._doubted = False
        self.resume_at = None

    def not_started(self, error: str, now: float, pause_seconds: float | None = None) -> float:
        """A call failed through no message's fault; returns when to go on, after so many seconds if that was said."""
        return self._pause(error, now, pause_seconds)

    def failed(self, messages: Iterable[Hashable], error: str, now: float) -> float | None:
        """A call about these failed. None: by itself, as far as is known; else it is an outage until then."""
        if error != self._error:
            self.succeeded(now)
            self._error = error
        call = frozenset(messages)
        self._failed = [other for other in self._failed if other.isdisjoint(call)]
        if len(self._failed) < _IN_A_ROW:
            self._failed.append(call)
        if self._doubted or (len(self._failed) < _IN_A_ROW and self.resume_at is None):
            return None
        if self.resume_at is None:
            self._began = now
        if now - self._began >= self._believed_seconds():
            # Nothing pauses any more, and nothing is forgiven, until something succeeds.
            self._doubted, self.resume_at = True, None
            return None
        return self._pause(error, now)

    def _pause(self, error: str, now: float, wished_seconds: float | None = None) -> float:
        self._error = error
        self._asked = self._asked or wished_seconds is not None
        if self.resume_at is None:
            self._began = now
        elif now < self.resume_at:
            # Of a call that ran already when the pause began.
            self.resume_at = max(self.resume_at, now + (wished_seconds or 0.0))
            return self.resume_at
        self._pauses += 1
        pause = min(_PAUSES.pause_seconds(self._pauses), self._subscription.retry.level_seconds(self._pauses))
        self.resume_at = now + (pause if wished_seconds is None else wished_seconds)
        return self.resume_at

    def _believed_seconds(self) -> float:
        retry = self._subscription.retry
        if retry.max_attempts is None:
            return float("inf")
        return sum(retry.delay_seconds(attempt) for attempt in range(1, retry.max_attempts))
