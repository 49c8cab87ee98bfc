"""The stop event of a consumer process, which an operator's request can set too.

See decision 232.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from outbox.broker.groups.members import ProcessRequest

logger = logging.getLogger(__name__)


class StopEvent(threading.Event):
    """An event that is set by a signal or by a request of an operator. `request` is None unless an operator asked.

    `on_request` is called in the thread that has read the request, before the event is set.
    """

    def __init__(self, on_request: Callable[[], None]) -> None:
        super().__init__()
        self._on_request = on_request
        self.request: ProcessRequest | None = None

    def ask(self, request: ProcessRequest) -> None:
        """Note the request and set the event."""
        is_first, self.request = self.request is None, request
        if is_first:
            self._on_request()
        self.set()


def stop_on_request(stop: threading.Event, request: ProcessRequest) -> None:
    """Set the stop event of a consumer process, because an operator has asked for it."""
    logger.warning("an operator asked this process to %s: it ends its running calls, and then itself", request)
    if isinstance(stop, StopEvent):
        stop.ask(request)
    else:
        stop.set()
