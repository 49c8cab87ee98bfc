"""Recall: requests of an application or an operator to the broker."""

from __future__ import annotations

from uuid import UUID

from django.utils.asyncio import async_unsafe

from outbox.arguments import key_text
from outbox.contrib.django.database.transactions import begun_by_hand, in_transaction
from outbox.contrib.django.engine.broker import get_broker, get_engine
from outbox.contrib.django.publishing.publish import initialized_connections
from outbox.errors import TransactionUsageError
from outbox.ports import Broker
from outbox.recall import Recall


@async_unsafe("recall() waits for a database: in a coroutine write `await sync_to_async(recall)(…)`.")
def recall(message_id: UUID) -> Recall:
    """Recall a message that waits for its delivery time or for a retry. Returns the outcome.

    A recall takes effect at once and cannot be undone. So this function refuses to run inside a transaction, which
    could roll back. Call `recall` in `transaction.on_commit`. A message that is already in its queue cannot be
    recalled. Another engine than PostgreSQL may be able to recall fewer messages (docs/engines.md). Raises BrokerError.
    """
    _refuse_in_transaction("recall(…)")
    return get_engine().recall_row(message_id) or _decided_broker().recall([message_id])[0]


@async_unsafe("recall_key() waits for a database: in a coroutine write `await sync_to_async(recall_key)(…)`.")
def recall_key(topic: str, key: object) -> list[Recall]:
    """Recall every waiting message of the topic and key.

    Returns the recalled messages. Otherwise, this function is like `recall`. Raises UnknownTopic.
    """
    _refuse_in_transaction("recall_key(…)")
    return _decided_broker().recall_key(topic, key_text(key))


def _decided_broker() -> Broker:
    # In a TestCase no transaction commits, so the in-memory broker decides only when `decide_ended` is called.
    get_engine().decide_ended()
    return get_broker()


def _refuse_in_transaction(what: str) -> None:
    for connection in initialized_connections():
        if in_transaction(connection):
            remedy = f"Write transaction.on_commit(lambda: {what}, using={connection.alias!r})."
        elif begun_by_hand(connection):
            # Django calls no on_commit function for such a transaction.
            remedy = "Commit it before the call."
        else:
            continue
        raise TransactionUsageError(
            f"{what} takes effect at once, but the transaction open on {connection.alias!r} could still roll "
            f"back, and the recalled message would then be missing. {remedy}"
        )
