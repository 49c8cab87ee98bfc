"""The progress of a run on standard error: a line per step, and a line every few seconds during a long step."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final, TextIO

from .safe_text import for_people

HEARTBEAT_SECONDS: Final = 10.0


class Progress:
    """Prints the steps of a run, each with the seconds since the start of the run."""

    def __init__(self, stream: TextIO | None = None, *, quiet: bool = False) -> None:
        self._stream = sys.stderr if stream is None else stream
        self._quiet = quiet
        self._started = time.monotonic()

    def say(self, text: str) -> None:
        """Print one line."""
        if not self._quiet:
            print(f"[{time.monotonic() - self._started:7.1f} s] {for_people(text)}", file=self._stream, flush=True)

    @contextmanager
    def step(self, text: str) -> Iterator[None]:
        """Print the name of a step that may take long, then a line every HEARTBEAT_SECONDS until the step ends."""
        self.say(text)
        done = threading.Event()

        def beat() -> None:
            began = time.monotonic()
            while not done.wait(HEARTBEAT_SECONDS):
                self.say(f"{text} … {time.monotonic() - began:.0f} s")

        thread = threading.Thread(target=beat, name="outbox-reconcile-progress", daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()
