"""Where figures of a running process go: one recorder, or nobody. Nothing is measured while there is none."""

from __future__ import annotations

from typing import Protocol

from outbox.transaction import CheckCounts


class Recorder(Protocol):
    """Takes figures; called from any thread, on hot paths: it must be quick and never raise. Times are in seconds."""

    def published(self, topics: list[str], path: str, seconds: float) -> None:
        """One publish call; `path`: direct, atomic or two_phase."""

    def handled(self, group: str, topic: str, waited: list[float], seconds: float, *, failed: int) -> None:
        """One call of a handler. `waited`: from publishing (or due time) to the call, for its first attempts."""

    def ticked(self, seconds: float, appended: int) -> None:
        """One tick of the sequencer that found something to do."""

    def checked(self, producer_group: str, counts: CheckCounts) -> None:
        """One pass of check-back."""


recorder: Recorder | None = None


def install(chosen: Recorder | None) -> None:
    """Send this process's figures there; None stops it."""
    global recorder
    recorder = chosen
