"""Sends the measured figures of this process to one recorder. Without a recorder, the process measures nothing."""

from __future__ import annotations

from typing import Protocol

from outbox.transaction import CheckCounts


class Recorder(Protocol):
    """Receives figures.

    Any thread may call a recorder for each message, so a recorder must be quick and never raise. Times are in seconds.
    """

    def published(self, topics: list[str], path: str, seconds: float) -> None:
        """Record one publish call. `path` is direct, atomic or two_phase."""

    def handled(self, group: str, topic: str, waited: list[float], seconds: float, *, failed: int) -> None:
        """Record one call of a handler.

        For first attempts, `waited` has the time from publishing (or from the due time) to the call.
        """

    def ticked(self, seconds: float, appended: int) -> None:
        """Record one tick in which the sequencer found work."""

    def checked(self, producer_group: str, counts: CheckCounts) -> None:
        """Record one pass of check-back."""


recorder: Recorder | None = None


def install(chosen: Recorder | None) -> None:
    """Send this process's figures to the recorder `chosen` from now on. If `chosen` is None, stop measuring."""
    global recorder
    recorder = chosen
