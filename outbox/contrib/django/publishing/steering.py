"""What an application or its operator asks of the broker beside publishing: recall, and the switch."""

from __future__ import annotations

from uuid import UUID

from django.utils.asyncio import async_unsafe

from outbox.contrib.django.database.transactions import current_transaction
from outbox.contrib.django.engine.broker import get_broker
from outbox.contrib.django.engine.in_memory import settle
from outbox.contrib.django.publishing.messages import key_text
from outbox.errors import TransactionUsageError
from outbox.memory import InMemoryBroker
from outbox.ports import Broker
from outbox.recall import Recall


@async_unsafe("recall() waits for a database: in a coroutine write `await sync_to_async(recall)(…)`.")
def recall(message_id: UUID) -> Recall:
    """Take back a message that waits for its delivery time, or for a retry; the result says what became of it.

    It takes effect at once and for good, so it is refused inside a transaction, which could roll back: call it in
    `transaction.on_commit`. A message that is in its queue already is delivered. Raises BrokerError.
    """
    _refuse_in_transaction("recall(…)")
    return _settled_broker().recall([message_id])[0]


@async_unsafe("recall_key() waits for a database: in a coroutine write `await sync_to_async(recall_key)(…)`.")
def recall_key(topic: str, key: object) -> list[Recall]:
    """Take back every message of the topic and key that waits so; what was taken. Otherwise like `recall`.

    Raises UnknownTopic.
    """
    _refuse_in_transaction("recall_key(…)")
    return _settled_broker().recall_key(topic, key_text(key))


def reject_transactional(rejecting: bool = True) -> bool:
    """Refuse new transactional messages on the broker, or take them again (False); returns whether that changed it.

    For everybody who publishes there, on both paths: `publish` in a transaction raises TransactionalMessagesRejected,
    and the transaction rolls back. What is stored already goes on. Raises BrokerError.
    """
    return get_broker().reject_transactional(rejecting)


def _settled_broker() -> Broker:
    broker = get_broker()
    if isinstance(broker, InMemoryBroker):
        # In a TestCase nothing commits, so nobody has told the broker.
        settle(broker)
    return broker


def _refuse_in_transaction(what: str) -> None:
    connection = current_transaction(None)
    if connection is not None:
        raise TransactionUsageError(
            f"{what} takes effect at once, and the transaction that is open on {connection.alias!r} could still roll "
            f"back: then a message would be missing. Write transaction.on_commit(lambda: {what}, "
            f"using={connection.alias!r})."
        )
