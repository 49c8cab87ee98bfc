"""A gate in front of the threads of a pool: at most a number of calls, which changes at run time, is past the gate.

An admission opens and closes it for a number of calls. The thread that has finished a call lets the next waiting call
pass, so the dispatching thread need not wake up.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

from outbox.broker.consumer.work import HandlerCall


class Gate:
    """`admit` gets each call that passes the gate. Any thread may call the methods."""

    def __init__(self, admit: Callable[[HandlerCall], None]) -> None:
        self._admit = admit
        self._lock = threading.Lock()
        self._waiting: deque[HandlerCall] = deque()
        self._allowed: int | None = None
        self._passed = 0

    @property
    def allowed(self) -> int | None:
        """At most this number of calls is past the gate; None if there is no limit."""
        return self._allowed

    @property
    def passed(self) -> int:
        """The number of calls that have passed the gate and have not ended."""
        return self._passed

    @property
    def waiting(self) -> int:
        """The number of calls that wait at the gate."""
        return len(self._waiting)

    def put(self, work: HandlerCall) -> None:
        """Let a call pass now, or when earlier calls have ended."""
        with self._lock:
            if not self._waiting and (self._allowed is None or self._passed < self._allowed):
                self._passed += 1
                self._admit(work)
            else:
                self._waiting.append(work)

    def done(self) -> None:
        """Record that a call past the gate has ended, and let the next call pass."""
        with self._lock:
            self._passed -= 1
            self._release()

    def next(self) -> HandlerCall | None:
        """Record that a call past the gate has ended, and return the next call, which the same thread runs.

        Return None if no call may pass. If the next call went to another thread, each call would cost a switch between
        threads.
        """
        with self._lock:
            if self._waiting and (self._allowed is None or self._passed <= self._allowed):
                return self._waiting.popleft()
            self._passed -= 1
            return None

    def allow(self, number: int | None) -> int:
        """Change the number of calls that may be past the gate. Return the number of calls that are past the gate now.

        If more calls have passed, they continue, and no call passes until enough of them have ended.
        """
        with self._lock:
            self._allowed = number
            self._release()
            return self._passed

    def withdraw(self) -> list[HandlerCall]:
        """Remove and return the calls that wait at the gate."""
        with self._lock:
            waiting = list(self._waiting)
            self._waiting.clear()
            return waiting

    def _release(self) -> None:
        while self._waiting and (self._allowed is None or self._passed < self._allowed):
            self._passed += 1
            self._admit(self._waiting.popleft())
