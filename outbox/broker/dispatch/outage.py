"""Tell a poison message from a service that is down, by identical errors in a row on different messages.

If a database or a service is down, every message fails, each after its own timeout, until the last one is a dead
letter. So three failures with the same error, of calls without a common message and without a success in between, count
as an **outage**. The subscription pauses. Its failed messages stay in place and use up no attempt. After the pause one
call at a time tests whether the outage is over. The first success ends it.

A few poison messages without other messages look the same. So an outage is assumed only as long as one message's own
series of attempts would take. After that, attempts count again, so every message comes to an end.

See decision 067.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable
from typing import Final

from outbox.subscription import Subscription
from outbox.utils.backoff import Backoff

_IN_A_ROW: Final = 3
_PAUSES: Final = Backoff(first_seconds=1.0, longest_seconds=60.0)


class Outage:
    """The failures in a row of one subscription. Times are of time.monotonic; one thread uses it."""

    def __init__(self, subscription: Subscription) -> None:
        self._subscription = subscription
        self._error = ""
        # The messages of calls in a row that failed with this error; no two calls share a message.
        self._failed: list[frozenset[Hashable]] = []
        self._pauses = 0
        self._began = 0.0
        self._is_over_time = False
        # Whether the handler has set the length of the pause.
        self._asked = False
        self.resume_at: float | None = None

    @property
    def error(self) -> str:
        """The error of the outage; '' without one."""
        return self._error if self.resume_at is not None else ""

    @property
    def pauses(self) -> int:
        """The number of pauses in this outage; 0 without one."""
        return self._pauses if self.resume_at is not None else 0

    def admits(self, now: float, *, running: bool) -> bool:
        """Whether a call may be started: always, except in an outage; then one at a time, after the pause."""
        return self.resume_at is None or (now >= self.resume_at and not running)

    def succeeded(self, now: float = math.inf) -> None:
        """A handler succeeded: earlier failures are the fault of their messages.

        A pause that a handler has requested still lasts its full time: the successful call may have begun before it.
        """
        if self._asked and self.resume_at is not None and now < self.resume_at:
            return
        self._asked = False
        self._error = ""
        self._failed = []
        self._pauses = 0
        self._is_over_time = False
        self.resume_at = None

    def not_started(self, error: str, now: float, pause_seconds: float | None = None) -> float:
        """Record a call that failed through no message's fault; returns when to continue."""
        return self._pause(error, now, pause_seconds)

    def failed(self, messages: Iterable[Hashable], error: str, now: float) -> float | None:
        """Record a failed call about these messages. Returns None for an ordinary failure, or the end of the pause."""
        if error != self._error:
            self.succeeded(now)
            self._error = error
        call = frozenset(messages)
        self._failed = [other for other in self._failed if other.isdisjoint(call)]
        if len(self._failed) < _IN_A_ROW:
            self._failed.append(call)
        if self._is_over_time or (len(self._failed) < _IN_A_ROW and self.resume_at is None):
            return None
        if self.resume_at is None:
            self._began = now
        if now - self._began >= self._believed_seconds():
            # Until a success there are no more pauses, and every attempt counts.
            self._is_over_time, self.resume_at = True, None
            return None
        return self._pause(error, now)

    def _pause(self, error: str, now: float, wished_seconds: float | None = None) -> float:
        self._error = error
        self._asked = self._asked or wished_seconds is not None
        if self.resume_at is None:
            self._began = now
        elif now < self.resume_at:
            # The call already ran when the pause began.
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
