"""Before each call of a handler: does an earlier message block the key?"""

from __future__ import annotations

import functools
from typing import Any

import psycopg
from django.db import DatabaseError, connections

from outbox.broker.database.executor import Executor
from outbox.contrib.blocked_keys.blocking import first_of_key
from outbox.contrib.blocked_keys.declaration import BlockKey, KeyBlocked
from outbox.contrib.django.settings.conf import get_settings
from outbox.errors import HandlerNotStarted
from outbox.message import Delivery
from outbox.ports import AnyHandler
from outbox.subscription import Subscription


def unless_blocked(option: BlockKey, subscription: Subscription, handler: AnyHandler) -> AnyHandler:
    """Return the handler, called only for messages whose key is not blocked.

    A dead letter is committed before the call of the next message of its key begins. So this call, or that of the
    queue's next owner, sees it.
    """
    call: Any = handler

    @functools.wraps(handler)
    def unblocked(delivery: Delivery) -> None:
        if delivery.key:
            _refuse(option, subscription, delivery)
        call(delivery)

    return unblocked


def _refuse(option: BlockKey, subscription: Subscription, delivery: Delivery) -> None:
    """Raise KeyBlocked, or HandlerNotStarted if too many messages wait or the broker cannot be read."""
    settings, group = get_settings(), subscription.group
    connection = connections[settings.broker]
    try:
        connection.ensure_connection()
        run = Executor(connection.connection, settings.schema)
        first, is_full = first_of_key(run, subscription, delivery.key, delivery.message_id, option.limit)
    except (psycopg.OperationalError, DatabaseError) as error:
        raise HandlerNotStarted(
            f"message {delivery.message_id} waits, because it is unknown whether its key is blocked: {error}"
        ) from error
    if first in (None, delivery.message_id):
        return
    if is_full:
        raise HandlerNotStarted(
            f"group {group!r} pauses on topic {subscription.topic!r}: {option.limit} messages block their keys or "
            f"wait, which is the limit of BlockKey. Settle the dead letters: `outbox_dead_letter list {group}`."
        )
    raise KeyBlocked(f"waits for message {first} of the same key, which is a dead letter")
