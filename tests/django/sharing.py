"""The waiting messages of a shared transaction, for tests that call `InboxInvoker.share` directly."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager

from outbox import Delivery
from outbox.utils import log_context


class Waiting:
    """Implements `ports.MoreCalls`. `ended` has the reasons that were given for the end of sharing."""

    def __init__(self, waiting: Sequence[Delivery]) -> None:
        self.waiting = list(waiting)
        self.ended: list[str] = []

    def next(self) -> Delivery | None:
        return self.waiting.pop(0) if self.waiting and not self.ended else None

    def running(self, delivery: Delivery) -> AbstractContextManager[None]:
        return log_context.handling([delivery])

    def finishing(self, number: int) -> None:
        pass

    def end_sharing(self, reason: str) -> None:
        self.ended.append(reason)
