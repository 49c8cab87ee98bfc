"""Pass over an erased message whose handler fails, so that the message is neither repeated nor a dead letter.

A handler that does not look at `delivery.erased` fails at the missing body, and no later attempt can succeed. Its
transaction is rolled back. The engine then calls the invoker again with a handler that does nothing, so the message
counts as handled, and its inbox row is stored.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from outbox.errors import OutboxError
from outbox.message import Delivery
from outbox.utils.safe_text import class_name_of

logger = logging.getLogger(__name__)


def is_to_pass(deliveries: Sequence[Delivery], outcomes: Sequence[object]) -> bool:
    """Whether the handler has failed at each of these deliveries, and all of them are erased."""
    return all(delivery.erased for delivery in deliveries) and all(map(_may_concern_body, outcomes))


def _may_concern_body(outcome: object) -> bool:
    # Only errors of outbox say so. An attribute of another error may raise.
    return outcome.may_concern_body if isinstance(outcome, OutboxError) else isinstance(outcome, Exception)


def report(deliveries: Sequence[Delivery], error: object) -> None:
    """Log that these erased messages are passed over."""
    logger.info(
        "group %s: the handler failed at %d erased messages (%s), which are passed over. Return early if "
        "delivery.erased is true.",
        deliveries[0].group,
        len(deliveries),
        class_name_of(type(error)),
    )


def do_nothing(given: Any) -> None:
    """The handler of messages that are passed over."""
