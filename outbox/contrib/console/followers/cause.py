"""The header `outbox-cause` of a message: the id of the message whose handler published it, and the handler's group."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from outbox.contrib.django.engine.broker import BodyStep
from outbox.hooks import Draft
from outbox.names import MAX_HEADERS
from outbox.utils import log_context

HEADER: Final = "outbox-cause"


class CauseStep(BodyStep):
    """Adds the header to what handlers publish."""

    def encode(self, draft: Draft) -> None:
        """Add the header, if a handler with one message publishes. A batch has no single cause.

        A header of the project's own stays. So does a message that has no room for it beside a time limit.
        """
        deliveries = log_context.handled()
        headers = {} if draft.headers is None else draft.headers
        if len(deliveries) != 1 or not isinstance(headers, Mapping):
            return
        if HEADER not in headers and len(headers) < MAX_HEADERS - 1:
            draft.headers = {**headers, HEADER: f"{deliveries[0].message_id} {deliveries[0].group}"}
