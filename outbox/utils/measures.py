"""Sends the measured figures of this process to its recorders. Without a recorder, the process measures nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Protocol, cast

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


def _together(recorders: Sequence[Recorder]) -> Recorder:
    """Return a recorder that sends each figure to several recorders."""

    def each(name: str) -> Callable[..., None]:
        methods = [getattr(one, name) for one in recorders]

        def send(*values: object, **named: object) -> None:
            for method in methods:
                method(*values, **named)

        return send

    names = ("published", "publish_failed", "handled", "ticked", "checked")
    return cast(Recorder, SimpleNamespace(**{name: each(name) for name in names}))


recorder: Recorder | None = None
_installed: tuple[Recorder, ...] = ()


def install(*chosen: Recorder) -> None:
    """Send this process's figures to the recorders `chosen` from now on. Without arguments, stop measuring."""
    global recorder, _installed
    _installed = chosen
    recorder = _together(chosen) if len(chosen) > 1 else next(iter(chosen), None)


def add(one: Recorder) -> None:
    """Send this process's figures to one more recorder. A recorder that is added again changes nothing."""
    if one not in _installed:
        install(*_installed, one)
