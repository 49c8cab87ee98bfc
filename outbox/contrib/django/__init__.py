"""Transactional messages for Django.

Importing this module needs no settings and no loaded apps, so models.py of any app may import this module.
"""

from typing import TYPE_CHECKING, Any

from outbox.contrib.django.engine.broker import get_broker
from outbox.contrib.django.publishing.checkback import run_check_back
from outbox.contrib.django.publishing.decorators import transactional_message
from outbox.contrib.django.publishing.fenced_producers import fenced_producer
from outbox.contrib.django.publishing.publish import (
    apublish,
    apublish_many,
    apublish_messages,
    message,
    publish,
    publish_many,
    publish_messages,
)
from outbox.contrib.django.publishing.steering import recall, recall_key
from outbox.contrib.django.subscribers.registry import subscriber

if TYPE_CHECKING:
    from outbox.contrib.django.ledger.pruning import run_prune
    from outbox.contrib.django.subscribers.outside import ClaimedDelivery

__all__ = [
    "ClaimedDelivery",
    "apublish",
    "apublish_many",
    "apublish_messages",
    "fenced_producer",
    "get_broker",
    "message",
    "publish",
    "publish_many",
    "publish_messages",
    "recall",
    "recall_key",
    "run_check_back",
    "run_prune",
    "subscriber",
    "transactional_message",
]


def __getattr__(name: str) -> Any:
    """Import `run_prune` and `ClaimedDelivery` when they are first used, because web processes do not need them."""
    if name == "ClaimedDelivery":
        from outbox.contrib.django.subscribers.outside import ClaimedDelivery

        return ClaimedDelivery
    if name == "run_prune":
        from outbox.contrib.django.ledger.pruning import run_prune

        return run_prune
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
