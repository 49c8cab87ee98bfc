"""Sends the measured figures of this process to its recorders. Without a recorder, the process measures nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from outbox.transaction import CheckCounts


class Recorder(Protocol):
    """Receives figures.

    Any thread may call a recorder for each message, so a recorder must be quick and never raise. Times are in seconds.
    """

    def published(self, topics: Sequence[str], path: str, seconds: float) -> None:
        """Record one publish call, with the topic of each message. `path` is direct, atomic or two_phase."""

    def publish_failed(self, topics: Sequence[str], seconds: float, error: BaseException) -> None:
        """Record one publish call that raised `error`, with the topic of each message."""

    def handled(
        self, group: str, topic: str, waited: list[float], seconds: float, *, count: int, failures: Sequence[object]
    ) -> None:
        """Record one call of a handler with `count` messages. `failures` has the error of each failed message.

        For first attempts, `waited` has the time from publishing (or from the due time) to the call.
        """

    def ticked(self, seconds: float, appended: int) -> None:
        """Record one tick in which the sequencer found work."""

    def checked(self, producer_group: str, counts: CheckCounts) -> None:
        """Record one pass of check-back."""


class _Recorders:
    """Sends each figure to several recorders."""

    def __init__(self, recorders: Sequence[Recorder]) -> None:
        self._recorders = recorders

    def published(self, topics: Sequence[str], path: str, seconds: float) -> None:
        for one in self._recorders:
            one.published(topics, path, seconds)

    def publish_failed(self, topics: Sequence[str], seconds: float, error: BaseException) -> None:
        for one in self._recorders:
            one.publish_failed(topics, seconds, error)

    def handled(
        self, group: str, topic: str, waited: list[float], seconds: float, *, count: int, failures: Sequence[object]
    ) -> None:
        for one in self._recorders:
            one.handled(group, topic, waited, seconds, count=count, failures=failures)

    def ticked(self, seconds: float, appended: int) -> None:
        for one in self._recorders:
            one.ticked(seconds, appended)

    def checked(self, producer_group: str, counts: CheckCounts) -> None:
        for one in self._recorders:
            one.checked(producer_group, counts)


recorder: Recorder | None = None


_installed: tuple[Recorder, ...] = ()


def install(*chosen: Recorder) -> None:
    """Send this process's figures to the recorders `chosen` from now on. Without arguments, stop measuring."""
    global recorder, _installed
    _installed = chosen
    recorder = _Recorders(chosen) if len(chosen) > 1 else next(iter(chosen), None)


def add(one: Recorder) -> None:
    """Send this process's figures to one more recorder. A recorder that is added again changes nothing."""
    if one not in _installed:
        install(*_installed, one)
