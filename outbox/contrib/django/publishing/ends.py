"""A producer's reports after its transaction: the decision if it is certain, otherwise a request for a check.

Django runs the `on_commit` callbacks after COMMIT was executed, but the call of a callback does not prove a commit. If
a statement failed and the application swallowed the error, PostgreSQL answers COMMIT with ROLLBACK and no error. Django
also runs callbacks for work that a manual `savepoint_rollback` has undone. So the producer reports COMMIT only if the
ledger row is visible. A missing row proves nothing, because a lagging replica may not have the row yet. If the row is
missing, the producer asks for an early check.

See decision 022.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from uuid import UUID

from django.db import InternalError
from django.db.backends.base.base import BaseDatabaseWrapper
from psycopg import Error as DriverError

from outbox import tracing
from outbox.broker.database.executor import Executor
from outbox.broker.transaction.decisions import standing_decisions
from outbox.contrib.django.database.database_errors import naming
from outbox.contrib.django.database.transactions import (
    BlockHalves,
    in_pipeline,
    lost,
    require_whole,
    sync_pipeline,
    watch_of,
)
from outbox.contrib.django.engine.broker import CurrentEngine, get_broker
from outbox.contrib.django.ledger import ledger
from outbox.contrib.django.settings.conf import get_settings
from outbox.message import SendReceipt
from outbox.ports import Broker
from outbox.transaction import Decision, EndTransaction, HalfTransaction
from outbox.utils import log_context
from outbox.utils.faults import point
from outbox.utils.safe_text import shown_text

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Published:
    """The receipts of one publish call. On the two-phase path, the object also has the call's half message.

    `xid` is the database's id of the local transaction (see ledger.insert_committed). `are_there` says whether the
    messages that the engine has stored as rows are still in the transaction.
    """

    receipts: Sequence[SendReceipt]
    half: HalfTransaction | None = None
    xid: str = ""
    are_there: Callable[[], bool] | None = None

    @property
    def is_stored(self) -> bool:
        """Whether the call has stored a message. If not, all its messages are duplicates."""
        return any(receipt.duplicate_of is None for receipt in self.receipts)


def report_after_commit(
    connection: BaseDatabaseWrapper, current: CurrentEngine, halves: BlockHalves, half: HalfTransaction
) -> None:
    """Report the decision of `half`, one of the open block's `halves`, after the block has committed."""
    halves.ids.append(half.transaction_id)
    # The result of an earlier look-up does not have this transaction.
    halves.in_ledger = None
    connection.on_commit(partial(_after_commit, connection, current, half, halves), robust=True)


def _after_commit(
    connection: BaseDatabaseWrapper, current: CurrentEngine, half: HalfTransaction, halves: BlockHalves
) -> None:
    point("producer.after_local_commit")
    if half.transaction_id in _in_ledger(connection, halves):
        _end_soon(current.broker_at_commit(), half, Decision.COMMIT)
    else:
        current.broker_at_commit().hint_one_way(half.transaction_id)


def _in_ledger(connection: BaseDatabaseWrapper, halves: BlockHalves) -> set[UUID]:
    """Return the transaction ids of the block's half messages that have a committed ledger row.

    One look-up reads all these ids, on the connection that wrote the ledger rows.
    """
    if halves.in_ledger is None:
        try:
            sync_pipeline(connection)
            halves.in_ledger = ledger.committed(connection, halves.ids)
        except Exception as error:
            # Only log the error of the look-up, because the transaction has already ended. The look-up fails, for
            # example, if a new connection has replaced the connection of the transaction.
            logger.info(
                "the ledger on %r cannot be read now, so check-back will read it: %s",
                connection.alias,
                shown_text(error),
            )
            halves.in_ledger = set()
    return halves.in_ledger


def confirm_before_commit(connection: BaseDatabaseWrapper, published: Published, name: str) -> None:
    """At the end of a block, verify that the block's first message still belongs to the block's transaction.

    If the message does not belong to the transaction any more, raise TransactionUsageError with `name`, the name of the
    decorated function. If the application marked the block for rollback, the function checks only whether the
    connection was closed.
    """
    if connection.closed_in_transaction:
        raise lost(connection, name, "the connection of the transaction was closed")
    if connection.needs_rollback:
        return
    with naming(f"the commit of {name}", connection):
        try:
            is_there = _is_there(connection, published)
        except (InternalError, DriverError) as error:
            raise lost(connection, name, str(error).strip()) from error
    if not is_there:
        raise lost(connection, name, "a ROLLBACK was executed in this transaction, so its messages are gone")


def _is_there(connection: BaseDatabaseWrapper, published: Published) -> bool:
    sync_pipeline(connection)
    if published.half is not None:
        return _is_half_there(connection, published.half)
    if published.are_there is not None:
        with connection.wrap_database_errors:
            return published.are_there()
    return _is_decision_there(connection, published.receipts[0].transaction_id)


def _is_half_there(connection: BaseDatabaseWrapper, half: HalfTransaction) -> bool:
    halves = watch_of(connection).halves
    found = ledger.committed(connection, halves.ids)
    if len(connection.atomic_blocks) == 1 and not in_pipeline(connection):
        # Only COMMIT follows, so `_after_commit` can use the ids in `found`, and does not need to read the ledger
        # again.
        halves.in_ledger = found
    return half.transaction_id in found


def _is_decision_there(connection: BaseDatabaseWrapper, transaction_id: UUID) -> bool:
    with connection.wrap_database_errors:
        return bool(standing_decisions(Executor(connection.connection, get_settings().schema), [transaction_id]))


def mark_transaction(connection: BaseDatabaseWrapper, name: str) -> str:
    """Return a mark that identifies the open transaction; '' on databases other than PostgreSQL.

    If a block publishes its messages at its end, `require_marked` compares this mark with the transaction that is open
    then.
    """
    if connection.vendor != "postgresql":
        return ""
    # In a pipeline, psycopg sends BEGIN together with the statement that reads the transaction id, which saves a round
    # trip.
    with naming(f"the transaction of {name}", connection), connection.connection.pipeline():
        return ledger.current_xid(connection)


def require_marked(connection: BaseDatabaseWrapper, mark: str, name: str) -> None:
    """Raise TransactionUsageError if the open transaction is not the transaction that `mark` identifies.

    Call this function before publishing.
    """
    require_whole(connection, lambda: f"publishing for {name}")
    with naming(f"publishing for {name}", connection):
        is_same = not mark or ledger.current_xid(connection) == mark
    if not is_same:
        raise lost(
            connection, name, "a COMMIT or ROLLBACK was executed inside the block, and another transaction has begun"
        )


def report_rollback(connection: BaseDatabaseWrapper, half: HalfTransaction, xid: str) -> None:
    """Report ROLLBACK if the rollback is certain, else ask for a check.

    Call this function after a block of this package has ended without a commit.
    """
    if _is_rolled_back(connection, half, xid):
        _end_soon(get_broker(), half, Decision.ROLLBACK)
    else:
        get_broker().hint_one_way(half.transaction_id)


def _is_rolled_back(connection: BaseDatabaseWrapper, half: HalfTransaction, xid: str) -> bool:
    raw = connection.connection
    if raw is None or getattr(raw, "closed", False) or connection.needs_rollback:
        # Do not open a new connection for this look-up. If the outer block needs a rollback, Django allows no statement
        # before that block ends.
        return False
    try:
        sync_pipeline(connection)
        return ledger.is_rolled_back(connection, half.transaction_id, xid)
    except Exception as error:
        logger.info(
            "the outcome of transaction %s on %r could not be read, so check-back will read it: %s",
            half.transaction_id,
            connection.alias,
            shown_text(error),
            extra=log_context.about_half(half),
        )
        return False


def _end_soon(broker: Broker, half: HalfTransaction, decision: Decision) -> None:
    """Report a decision to the broker without waiting for the answer."""
    if tracing.tracer is not None:
        tracing.tracer.decided(half, decision)
    end = EndTransaction(transaction_id=half.transaction_id, decision=decision, producer_group=half.producer_group)
    broker.end_one_way(end)
