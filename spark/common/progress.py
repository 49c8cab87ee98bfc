"""The progress of a run: a line on standard error for each step, with the seconds since the start of the run."""

from __future__ import annotations

import sys
import time
from typing import TextIO

from .safe_text import for_people


class Progress:
    def __init__(self, stream: TextIO | None = None, *, quiet: bool = False) -> None:
        self._stream = sys.stderr if stream is None else stream
        self._quiet = quiet
        self._started = time.monotonic()

    def say(self, text: str) -> None:
        """Print one line."""
        if not self._quiet:
            print(f"[{time.monotonic() - self._started:7.1f} s] {for_people(text)}", file=self._stream, flush=True)
