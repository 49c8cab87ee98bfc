"""Producers with a transactional id: the newest instance fences the older instances.

Each instance that takes over a transactional id raises the epoch of the id. The transaction that stores messages under
the id checks the epoch under a shared lock, and a newer instance waits for this lock. Once the newer instance has its
epoch, an older instance can no longer commit messages in its local transaction. If an older instance stored a half
message before the takeover, the half message stays undecided until check-back decides it by the ledger. `leftovers`
lists the undecided transactions of older instances. The newer instance waits until these transactions are decided.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final
from uuid import UUID

from psycopg import errors as pg

from outbox.broker.database.arrays import uuids
from outbox.broker.database.executor import Executor
from outbox.broker.database.statement import Statement
from outbox.broker.transaction.half_scan import hint_checks
from outbox.errors import LeftoversUndecided, ProducerFenced
from outbox.transaction import CheckSettings, ProducerEpoch

# This advisory lock is needed in addition to the lock of the row. With the row lock alone, overlapping transactions
# could share the row lock for ever, and an instance that wants to raise the epoch would never get the row lock.
_LOCK_NAME: Final = "hashtextextended(%(producer_group)s || chr(31) || %(transactional_id)s, 20)"

_SHARE = Statement(f"SELECT pg_advisory_xact_lock_shared({_LOCK_NAME})")
_EXCLUDE = Statement(f"SELECT pg_advisory_xact_lock({_LOCK_NAME})")
_LIMIT_WAITING = Statement("SELECT set_config('lock_timeout', %(milliseconds)s || 'ms', true)")

# FOR SHARE reads the newest version of the row regardless of the transaction's snapshot, or fails.
_EPOCH = Statement("""
SELECT epoch FROM {schema}.producer_epoch
WHERE producer_group = %(producer_group)s AND transactional_id = %(transactional_id)s
FOR SHARE
""")

_RAISE = Statement("""
INSERT INTO {schema}.producer_epoch AS known (producer_group, transactional_id, epoch)
VALUES (%(producer_group)s, %(transactional_id)s, 1)
ON CONFLICT (producer_group, transactional_id) DO UPDATE SET epoch = known.epoch + 1
RETURNING epoch
""")

# Retention never removes undecided half messages from the log. Retention removes decided half messages together with
# their decisions.
_UNDECIDED: Final = """EXISTS (SELECT FROM {schema}.commit_log half WHERE half.message_id = noted.transaction_id)
    AND NOT EXISTS (SELECT FROM {schema}.op_log WHERE op_log.transaction_id = noted.transaction_id)"""

# The statement deletes the rows of decided half messages. A transactional id has few undecided half messages, so the
# table stays small.
_NOTE = Statement(f"""
WITH forgotten AS (
    DELETE FROM {{schema}}.fenced_half noted
    WHERE producer_group = %(producer_group)s AND transactional_id = %(transactional_id)s
      AND transaction_id <> %(transaction_id)s AND NOT ({_UNDECIDED})
)
INSERT INTO {{schema}}.fenced_half (transaction_id, producer_group, transactional_id, epoch)
VALUES (%(transaction_id)s, %(producer_group)s, %(transactional_id)s, %(epoch)s)
ON CONFLICT (transaction_id) DO NOTHING
""")

_LEFTOVERS = Statement(f"""
SELECT transaction_id FROM {{schema}}.fenced_half noted
WHERE producer_group = %(producer_group)s AND transactional_id = %(transactional_id)s AND epoch < %(epoch)s
  AND {_UNDECIDED}
ORDER BY transaction_id
""")

_END_IMMUNITY = Statement("""
UPDATE {schema}.pending_check SET immune_until = least(immune_until, now())
WHERE transaction_id = ANY(%(ids)s::uuid[]) AND parked_at IS NULL
""")


def take_over(run: Executor, producer_group: str, transactional_id: str, *, timeout_seconds: float) -> ProducerEpoch:
    """Raise the epoch of a transactional id: from now on, messages with an older epoch are refused.

    The function waits up to `timeout_seconds` for transactions on this server that publish messages under an older
    epoch. If these transactions do not end in this time, it raises LeftoversUndecided and changes nothing.
    """
    producer = {"producer_group": producer_group, "transactional_id": transactional_id}
    try:
        with run.connection.transaction():
            run.execute(_LIMIT_WAITING, {"milliseconds": str(max(1, int(timeout_seconds * 1000)))})
            run.execute(_EXCLUDE, producer)
            [epoch] = run.one(_RAISE, producer)
    except pg.LockNotAvailable as error:
        raise LeftoversUndecided(
            f"producer {transactional_id!r} of group {producer_group!r}: a transaction of an older instance "
            f"has been open for more than {timeout_seconds:g} s. Nothing has changed, and the older instance can still "
            f"publish. End that instance, or try again."
        ) from error
    return ProducerEpoch(producer_group=producer_group, transactional_id=transactional_id, epoch=epoch)


def check_epoch(run: Executor, producer: ProducerEpoch) -> None:
    """Raise ProducerFenced unless `producer` is the newest instance; call it in the transaction that stores messages.

    Until this transaction ends, no newer instance can take over the transactional id.
    """
    parameters = {"producer_group": producer.producer_group, "transactional_id": producer.transactional_id}
    run.execute(_SHARE, parameters)
    try:
        found = run.row(_EPOCH, parameters)
    except pg.SerializationFailure as error:
        # The row changed after the snapshot of this REPEATABLE READ transaction: the epoch was raised.
        raise _fenced(producer, "a newer epoch") from error
    if found is None:
        raise ProducerFenced(
            f"producer {producer.transactional_id!r} of group {producer.producer_group!r} is not known to the broker. "
            f"Nothing was published. Check that this is the right database, then take over the transactional id again."
        )
    if found[0] != producer.epoch:
        raise _fenced(producer, f"epoch {found[0]}")


def note_half(run: Executor, producer: ProducerEpoch, transaction_id: UUID) -> None:
    """Store that `producer` has this half message, so that a newer instance waits until the half message is decided."""
    run.execute(
        _NOTE,
        {
            "transaction_id": transaction_id,
            "producer_group": producer.producer_group,
            "transactional_id": producer.transactional_id,
            "epoch": producer.epoch,
        },
    )


def leftovers(run: Executor, producer: ProducerEpoch, *, settings: CheckSettings) -> list[UUID]:
    """Return the undecided transactions of older instances, and end their immunity, so that checks are due now.

    Immunity delays checks while the sender may still commit. Here a newer instance has replaced the senders, so the
    checks need no delay. If a local transaction is still running, the ledger's barrier answers UNKNOWN.
    """
    rows = run.rows(
        _LEFTOVERS,
        {
            "producer_group": producer.producer_group,
            "transactional_id": producer.transactional_id,
            "epoch": producer.epoch,
        },
    )
    found: Sequence[UUID] = [transaction_id for (transaction_id,) in rows]
    if found:
        hint_checks(run, found, settings=settings)
        run.execute(_END_IMMUNITY, {"ids": uuids(found)})
    return list(found)


def _fenced(producer: ProducerEpoch, newest: str) -> ProducerFenced:
    return ProducerFenced(
        f"producer {producer.transactional_id!r} of group {producer.producer_group!r}: this instance has epoch "
        f"{producer.epoch}, but an instance with {newest} has taken over. Nothing was published. End this process. "
        f"Or, if the other instance was started by mistake, take over the transactional id again."
    )
