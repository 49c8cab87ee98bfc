"""`message_transaction()` publishes several messages, to several topics, that become visible together or never.

Inside `atomic()`, all messages share one ledger row, one half batch, one decision and one row of the op log. Outside of
`atomic()` (`at_once=True`), one statement stores the messages when the block ends. Before the block ends, the broker
has stored nothing. So if a process dies inside a block, it leaves no undecided transaction in the broker, and no other
message must wait.

In Kafka, an open transaction is open in the broker, and readers stop before it until its timeout. Here no transaction
without a local one is ever undecided.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from types import TracebackType
from typing import Any, Final, Self
from uuid import UUID

from django.db.backends.base.base import BaseDatabaseWrapper

from outbox import names
from outbox.contrib.django.database.transactions import watch_of
from outbox.contrib.django.engine.broker import get_broker
from outbox.contrib.django.publishing.checkback import run_check_back
from outbox.contrib.django.publishing.publish import (
    at_once_in_transaction,
    current_transaction,
    failing_takes_the_block_along,
    message,
    publish_bound,
    transaction_required,
)
from outbox.contrib.django.settings.conf import get_settings
from outbox.errors import InvalidMessage, LeftoversUndecided, TransactionTimedOut, TransactionUsageError, UsageError
from outbox.hooks import Option
from outbox.message import Message, SendReceipt
from outbox.transaction import ProducerEpoch
from outbox.utils.backoff import Backoff
from outbox.utils.safe_text import shown_text

# This process keeps all messages of a transaction in memory, until one statement sends them.
MAX_BYTES: Final = 64 * 1024 * 1024

DEFAULT_TIMEOUT_SECONDS: Final = 60.0


def message_transaction(
    *, using: str | None = None, at_once: bool = False, timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS
) -> MessageTransaction:
    """Return a context manager for a block whose messages become visible together or never, also over several topics.

        with message_transaction() as tx:
            tx.publish("orders", {...}, key=order.pk)
            tx.publish("points", {...}, key=order.customer_id)

    Inside `atomic()`, the messages belong to the transaction of `atomic()`. If transactions are open on several
    aliases, `using` names the alias. When the block ends, the keys of FIFO topics are locked in a fixed order, and then
    the messages are stored. Outside of `atomic()`, the block raises TransactionRequired. If no row belongs to the
    messages, pass `at_once=True` there: the messages are then sent when the block ends, if the block was open for at
    most `timeout_seconds`. If the block raises an exception, no message is sent. If `publish` raises an exception
    and the block catches this exception, no message is sent either.
    """
    return MessageTransaction(using=using, at_once=at_once, timeout_seconds=timeout_seconds)


class MessageTransaction:
    """The messages of one `message_transaction()` block. Use each object for only one block, in one thread."""

    def __init__(
        self,
        *,
        using: str | None = None,
        at_once: bool = False,
        timeout_seconds: float,
        producer: ProducerEpoch | None = None,
    ) -> None:
        self._using = using
        self._at_once = at_once
        self._timeout_seconds = timeout_seconds
        self._producer = producer
        self._connection: BaseDatabaseWrapper | None = None
        self._block: object = None
        self._entered_at: float | None = None
        self._is_over = False
        self._failure: BaseException | None = None
        self._messages: list[Message] = []
        self._size = 0
        self._receipts: Sequence[SendReceipt] = ()

    @property
    def receipts(self) -> Sequence[SendReceipt]:
        """One receipt per message, in the order of the `publish` calls.

        The sequence is empty until the block has ended.
        """
        return self._receipts

    def __enter__(self) -> Self:
        if self._entered_at is not None:
            raise TransactionUsageError(
                "this message_transaction() was used before: call message_transaction() for each block."
            )
        connection = current_transaction(self._using)
        if connection is None and not self._at_once:
            raise transaction_required("message_transaction()", self._using)
        if connection is not None and self._at_once:
            raise at_once_in_transaction("message_transaction()", connection)
        self._connection = connection
        self._block = _innermost(self._connection)
        self._entered_at = time.monotonic()
        return self

    def publish(
        self,
        topic: str,
        body: Any,
        *options: Option,
        key: object = "",
        tag: str = "",
        headers: Mapping[str, str] | None = None,
        delay: float | timedelta | None = None,
        deliver_at: datetime | None = None,
        timeout: float | timedelta | None = None,
    ) -> UUID:
        """Add a message and return its id.

        The message is encoded and checked now, and stored when the block ends.

        The parameters are the same as for `publish`. Options lock when the block ends. Raises UsageError for a
        message that can never be sent. After this error, no message of the transaction is sent.
        """
        with failing_takes_the_block_along(self._alias):
            try:
                built = message(
                    topic,
                    body,
                    *options,
                    key=key,
                    tag=tag,
                    headers=headers,
                    delay=delay,
                    deliver_at=deliver_at,
                    timeout=timeout,
                )
                self._add(built)
            except BaseException as error:
                self._failure = error if self._failure is None else self._failure
                raise
        return built.message_id

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._is_over = True
        if self._connection is not None:
            watch_of(self._connection).unsent.discard(self)
        if error is None:
            with failing_takes_the_block_along(self._using):
                self._store()

    @property
    def _alias(self) -> str | None:
        """The alias of the open transaction in which this block began, or else the alias that the caller named."""
        return self._using if self._connection is None else self._connection.alias

    def _store(self) -> None:
        if self._failure is not None:
            raise TransactionUsageError(
                f"a message of this message_transaction() could not be added ({shown_text(self._failure)}), so its "
                f"{len(self._messages)} other messages were not sent. Let that error leave the `with` block, or "
                "publish that message outside of the block."
            ) from self._failure
        if not self._messages:
            return
        self._refuse_if_late()
        published = publish_bound(
            self._messages, using=self._using, producer=self._producer, at_once=self._connection is None
        )
        self._receipts = published.receipts

    def _add(self, built: Message) -> None:
        name = f"message {built.message_id} for topic {built.topic!r}"
        if self._entered_at is None or self._is_over:
            raise TransactionUsageError(
                f"{name}: publish inside `with message_transaction() as tx`, not before or after it."
            )
        self._refuse_another_block(name)
        self._size += len(built.body)
        if self._size > MAX_BYTES:
            raise InvalidMessage(
                f"{name}: with this message, the bodies of the transaction would be larger than "
                f"{MAX_BYTES // 1024**2} MiB together ({len(self._messages)} messages were added before). "
                "No message of this transaction was sent. Publish fewer messages in one transaction."
            )
        self._messages.append(built)
        if self._connection is not None:
            watch_of(self._connection).unsent.add(self)

    def _refuse_another_block(self, name: str) -> None:
        """Refuse a message if the innermost atomic block is not the block in which this transaction began.

        The message is stored outside of an inner savepoint, so the rollback of the savepoint would not remove the
        message.
        """
        found = current_transaction(self._alias)
        if found is self._connection and _innermost(found) is self._block:
            return
        raise TransactionUsageError(
            f"{name}: an inner atomic() was opened after this message_transaction() had begun, and a rollback of the "
            "inner block would not remove the message. Begin the message_transaction() inside the inner atomic(), or "
            "publish before the inner atomic()."
        )

    def _refuse_if_late(self) -> None:
        if self._connection is not None or self._entered_at is None:
            return
        open_seconds = time.monotonic() - self._entered_at
        if open_seconds > self._timeout_seconds:
            raise TransactionTimedOut(
                f"the transaction of {len(self._messages)} messages beginning with {self._messages[0].message_id} "
                f"(topic {self._messages[0].topic!r}) was open for {open_seconds:.1f} s, and its limit is "
                f"{self._timeout_seconds:g} s. No message of this transaction was published, because the data in "
                "the messages may be out of date. Run the block again, or pass a longer "
                "message_transaction(timeout_seconds=…)."
            )


def _innermost(connection: BaseDatabaseWrapper | None) -> object:
    return connection.atomic_blocks[-1] if connection is not None and connection.atomic_blocks else None


# -- fenced producers ------------------------------------------------------------------------------
#
# A fenced producer has at most one active instance. A new instance takes over the transactional id and fences the older
# instances.


_BACKOFF: Final = Backoff(first_seconds=0.05, longest_seconds=1.0, factor=2)


class FencedProducer:
    """The newest instance of a producer with a transactional id; made by `fenced_producer`.

    Threads may share the object.
    """

    def __init__(self, instance: ProducerEpoch) -> None:
        self.instance: Final = instance

    def transaction(
        self, *, using: str | None = None, at_once: bool = False, timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS
    ) -> MessageTransaction:
        """Like `message_transaction()`, but the end of the block raises ProducerFenced if a newer instance exists."""
        return MessageTransaction(using=using, at_once=at_once, timeout_seconds=timeout_seconds, producer=self.instance)


def fenced_producer(transactional_id: str, *, wait_seconds: float = 30.0) -> FencedProducer:
    """Take over `transactional_id` within this service's PRODUCER_GROUP.

    Call this function once, when the process starts. After this call, the broker refuses older instances. Before it
    returns, the function decides the undecided transactions of older instances by check-backs, which do not wait for
    immunity. The function takes at most `wait_seconds`. If such transactions are still undecided after this time, the
    function raises LeftoversUndecided: an older instance has not ended its transaction, or no process can answer the
    checks. The text of this error says whether the older instances are fenced.
    """
    names.check_group(transactional_id)
    if not names.is_seconds(wait_seconds):
        raise UsageError(
            f"fenced_producer(wait_seconds={wait_seconds!r}): give a number of seconds from 0 to "
            f"{names.MAX_WAIT_SECONDS:,} (24 days)."
        )
    group = get_settings().required_producer_group()
    deadline = time.monotonic() + wait_seconds
    broker = get_broker()
    instance = broker.take_over(group, transactional_id, timeout_seconds=wait_seconds)
    pause = threading.Event()
    rounds = 0
    while left := broker.leftovers(instance):
        if rounds:
            pause_seconds = _BACKOFF.pause_seconds(rounds)
            if time.monotonic() + pause_seconds >= deadline:
                raise LeftoversUndecided(
                    f"producer {transactional_id!r} of group {group!r}: {len(left)} transactions of older instances "
                    f"are undecided after {wait_seconds:g} s; the first transaction is {left[0]}. `manage.py "
                    f"outbox_message show {left[0]}` shows the answers of its checks; a local transaction that is "
                    "still open must end first. The older instances are fenced. Call fenced_producer() again."
                )
            pause.wait(pause_seconds)
        run_check_back()
        rounds += 1
    return FencedProducer(instance)
