"""Periodic work of a service, whoever runs it: Celery beat, or a loop of its own."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class PeriodicPass:
    """A bounded pass to run every `interval_seconds`; `run` returns what it counted.

    A true count `more` says that the pass has left something: it is run again at once, after other passes that are due.
    """

    name: str
    run: Callable[[], Mapping[str, Any]]
    interval_seconds: float


class BackgroundLoop:
    """Runs a pass again and again in a thread of its own, from `start` to `stop`.

    `run` is given a function that tells whether to stop early, and returns the seconds until the next pass;
    `every_seconds` is the wait after one that failed, `first_seconds` before the first. Of `expected` errors one line
    is logged. Any other would end the thread, and with it the service: it is logged in full, and the loop goes on.
    """

    def __init__(
        self,
        name: str,
        run: Callable[[Callable[[], bool]], float],
        *,
        every_seconds: float,
        first_seconds: float,
        expected: tuple[type[Exception], ...],
    ) -> None:
        self._name = name
        self._run = run
        self._every_seconds = every_seconds
        self._first_seconds = first_seconds
        self._expected = expected
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._loop, name=f"outbox-{name}", daemon=True)

    def start(self) -> None:
        """Begin; the first pass comes after `first_seconds`."""
        self._thread.start()

    def stop(self) -> None:
        """Begin no pass more, and cut the one that runs short; returns at once."""
        self._ended.set()

    def join(self) -> None:
        """Wait for the pass that runs, at most 5 s."""
        self._thread.join(timeout=5)

    def _loop(self) -> None:
        pause = self._first_seconds
        while not self._ended.wait(pause):
            pause = self._every_seconds
            try:
                pause = self._run(self._ended.is_set)
            except self._expected as error:
                logger.warning("%s comes again in %.0f s: %s", self._name, pause, error)
            except Exception:
                logger.exception("%s failed", self._name)
