"""Periodic work of a service, which Celery beat or a loop of a worker runs."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from outbox.utils.safe_text import printable, shown_text

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class PeriodicPass:
    """A bounded pass that runs every `interval_seconds`. `run` runs it once and returns its counts.

    If the count `more` is true, it runs again as soon as all other due passes have run.
    """

    name: str
    run: Callable[[], Mapping[str, Any]]
    interval_seconds: float


class BackgroundLoop:
    """Runs a pass repeatedly in its own thread, from `start` to `stop`.

    `run` gets a function that returns True if the pass must stop early. It returns the seconds until the next pass, or
    None: then the next pass waits for `wake`. `every_seconds` is the wait after a failed pass. An `expected` error is
    logged in one line, any other one with its traceback. No error ends the loop.
    """

    def __init__(
        self,
        name: str,
        run: Callable[[Callable[[], bool]], float | None],
        *,
        every_seconds: float,
        first_seconds: float | None,
        expected: tuple[type[Exception], ...],
    ) -> None:
        self._name = name
        self._run = run
        self._every_seconds = every_seconds
        self._first_seconds = first_seconds
        self._expected = expected
        self._ended = threading.Event()
        self._woken = threading.Event()
        self._thread = threading.Thread(target=self._loop, name=f"outbox-{name}", daemon=True)

    def start(self) -> None:
        """Start the thread. The first pass runs after `first_seconds`."""
        self._thread.start()

    def wake(self) -> None:
        """Run the next pass at once, or directly after the running pass. Return at once."""
        self._woken.set()

    def stop(self) -> None:
        """Start no further pass and ask a running pass to stop early. Return at once."""
        self._ended.set()
        self._woken.set()

    def join(self) -> None:
        """Wait at most 5 s until the running pass has ended."""
        self._thread.join(timeout=5)

    def _loop(self) -> None:
        pause = self._first_seconds
        while not self._is_ended_after(pause):
            pause = self._every_seconds
            try:
                pause = self._run(self._ended.is_set)
            except self._expected as error:
                said = shown_text(error)
                logger.warning("%s failed and runs again in %.0f s: %s", self._name, self._every_seconds, said)
            except Exception as error:
                logger.error("%s failed", self._name, exc_info=printable(error))

    def _is_ended_after(self, pause: float | None) -> bool:
        """Wait for `pause`, `wake` or `stop`, and return whether the loop has ended."""
        self._woken.wait(pause)
        # `stop` sets `_ended` first, so a call of `stop` during this line is seen by the next line or the next wait.
        self._woken.clear()
        return self._ended.is_set()
