"""The default checker: it answers from the ledger's rows, or with the barrier if a row is missing.

A ledger row 'C' was committed together with the business write. A ledger row 'R' is a tombstone. If there is no row,
the checker tries to write the tombstone itself, by a plain INSERT in autocommit with a very short lock wait:

- The INSERT succeeds: the local transaction has not committed. That transaction can never commit, because its own
  ledger row would collide with the tombstone.
- The INSERT would have to wait: the local transaction is still running. The answer is UNKNOWN, and no check is counted.
- The INSERT collides: another transaction has committed the row meanwhile. The checker reads this row with a new
  statement.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from typing import Final
from uuid import UUID

from django.db import connections, router
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.utils import DatabaseError, IntegrityError

from outbox.contrib.django.database import deadline
from outbox.contrib.django.database.database_errors import is_contention
from outbox.contrib.django.database.in_tests import guarded_off
from outbox.contrib.django.ledger import ledger
from outbox.transaction import STILL_RUNNING, Answer, Check, Decision
from outbox.utils.faults import point
from outbox.utils.safe_text import shown_text

# A tombstone's INSERT waits at most this long for a lock. This time is long enough for another checker's INSERT to end,
# and so short that the wait hardly delays other answers.
LOCK_TIMEOUT_MILLISECONDS: Final = 20

# In a request with a deadline, a connection attempt fails if the server does not respond within this number of seconds.
_CONNECT_SECONDS: Final = 3

# Django gives this engine to an alias without settings, which many projects have as an empty "default".
_NO_ENGINE: Final = "django.db.backends.dummy"

_DECISIONS: Final = {ledger.COMMITTED: Decision.COMMIT, ledger.ROLLED_BACK: Decision.ROLLBACK}


class LedgerChecker:
    """Implements ports.Checker for the ledgers of this project's databases."""

    def __init__(self, aliases: Sequence[str] | None = None) -> None:
        self._aliases = ledger_aliases(usable=True) if aliases is None else list(aliases)

    def check_local_transactions(self, checks: Sequence[Check]) -> Iterator[Answer]:
        """See ports.Checker.

        The checker reads each ledger on a new connection to the primary that the ledger's alias names.
        """
        waiting = list(checks)
        unreadable: list[str] = []
        for alias in self._aliases:
            if not waiting:
                return
            with closing(open_connection(alias)) as connection:
                try:
                    with ledger.without_timeouts(connection):
                        identity = ledger.identity(connection)
                        read_only = ledger.is_read_only(connection)
                except DatabaseError as error:
                    unreadable.append(f"{alias!r} ({shown_text(error)})")
                    continue
                if read_only:
                    unreadable.append(f"{alias!r} (read-only)")
                    continue
                mine = [check for check in waiting if identity and check.ledger_id == identity.ledger_id]
                if identity is not None and mine:
                    waiting = [check for check in waiting if check.ledger_id != identity.ledger_id]
                    yield from answer_by_ledger(connection, mine, pruned_before=identity.pruned_before)
        yield from (_elsewhere(check, self._aliases, unreadable) for check in waiting)


def ledger_aliases(*, usable: bool = False) -> list[str]:
    """Return the aliases on which the database routers allow a ledger.

    If `usable` is true, return only aliases that the running test may use. The test cannot have published on another
    alias.
    """
    from outbox.contrib.django.models import LedgerEntry

    return [
        alias
        for alias in connections
        if connections.settings[alias]["ENGINE"] != _NO_ENGINE
        and router.allow_migrate_model(alias, LedgerEntry)
        and not (usable and guarded_off(alias))
    ]


def open_connection(alias: str, *, connect_seconds: int | None = None) -> BaseDatabaseWrapper:
    """Return a new connection in autocommit mode. Django's `connections` does not contain the connection.

    `connect_seconds`: the longest wait for the server, in place of the project's own; None keeps that one, and limits
    the wait only within a deadline.
    """
    connection = connections.create_connection(alias)
    options = dict(connection.settings_dict["OPTIONS"])
    # Do not use Django's pool: its connections still have the search path of their last user.
    options.pop("pool", None)
    if connection.vendor == "sqlite":
        options["timeout"] = LOCK_TIMEOUT_MILLISECONDS / 1000
    if connection.vendor == "postgresql":
        # With this name, an operator can recognise the connection among the server's sessions.
        options["application_name"] = "outbox-ledger"
    if connection.vendor in ("postgresql", "mysql") and deadline.seconds_left() is not None:
        options.setdefault("connect_timeout", _CONNECT_SECONDS)
    if connect_seconds is not None:
        options["connect_timeout"] = connect_seconds
    connection.settings_dict = {**connection.settings_dict, "OPTIONS": options, "AUTOCOMMIT": True}
    return connection


def answer_by_ledger(
    connection: BaseDatabaseWrapper, checks: Sequence[Check], *, pruned_before: UUID | None = None
) -> Iterator[Answer]:
    """Answer checks that all name the ledger on `connection`: first from the ledger's rows, then by the barrier."""
    try:
        states = _states(connection, checks)
    except DatabaseError as error:
        yield from _all_unknown(checks, error)
        return
    absent: list[Check] = []
    for check in checks:
        if check.transaction_id in states:
            yield _decided(check, states[check.transaction_id])
        elif not check.may_write:
            yield _unknown(
                check, "the transaction has no ledger row: it was rolled back, or it is still open", counts=False
            )
        elif pruned_before is not None and check.transaction_id < pruned_before:
            yield _unknown(
                check,
                "the transaction is older than the rows that the ledger keeps, so an operator must decide it",
                alarm=True,
            )
        else:
            absent.append(check)
    if absent:
        _limit_waiting(connection)
        yield from _barrier(connection, sorted(absent, key=lambda check: check.transaction_id))


def _states(connection: BaseDatabaseWrapper, checks: Sequence[Check]) -> dict[UUID, str]:
    with ledger.without_timeouts(connection):
        return ledger.states(connection, [check.transaction_id for check in checks])


def _limit_waiting(connection: BaseDatabaseWrapper) -> None:
    """Limit the wait for locks on MariaDB.

    On PostgreSQL the statement itself limits this wait. On SQLite the connection's settings contain the limit.
    """
    if connection.vendor == "mysql":
        with connection.cursor() as cursor:
            # Both limits are whole seconds. With 0, MariaDB does not wait for a row lock. One second is enough for
            # another session's short lock of the whole table.
            cursor.execute("SET SESSION innodb_lock_wait_timeout = 0, lock_wait_timeout = 1")


def _barrier(connection: BaseDatabaseWrapper, checks: Sequence[Check]) -> Iterator[Answer]:
    """Write the tombstones for all of `checks` in one statement.

    If the statement fails, divide the checks into halves, and try each half.
    """
    point("check.before_tombstone")
    ledger_id = checks[0].ledger_id
    assert ledger_id is not None
    try:
        written = _insert(connection, [check.transaction_id for check in checks], ledger_id=ledger_id)
    except IntegrityError:
        yield from _after_conflict(connection, checks)
        return
    except DatabaseError as error:
        if len(checks) == 1 or not (isinstance(error, _OneAtATime) or is_contention(error)):
            yield from _all_unknown(checks, error)
            return
        middle = len(checks) // 2
        yield from _barrier(connection, checks[:middle])
        yield from _barrier(connection, checks[middle:])
        return
    point("check.after_tombstone")
    for check in checks:
        if check.transaction_id in written:
            yield _decided(check, ledger.ROLLED_BACK)
        else:
            yield _unknown(check, "the ledger was emptied or pruned while it was read", counts=False)


def write_tombstones(connection: BaseDatabaseWrapper, transaction_ids: Sequence[UUID], *, ledger_id: UUID) -> set[UUID]:
    """Try to write a tombstone for each transaction without a ledger row (the barrier), without answering a check.

    Returns the ids that still have no ledger row, because their transactions are still open.

    Call this function for half messages whose immunity has ended. If a transaction has a ledger row afterwards, the
    checker can answer its checks at any later time.
    """
    known = ledger.states(connection, transaction_ids)
    absent = [transaction_id for transaction_id in transaction_ids if transaction_id not in known]
    if not absent:
        return set()
    _limit_waiting(connection)
    for transaction_id in absent:
        try:
            _insert(connection, [transaction_id], ledger_id=ledger_id)
        except DatabaseError as error:
            if not (isinstance(error, IntegrityError) or is_contention(error)):
                raise
    return set(absent).difference(ledger.states(connection, absent))


class _OneAtATime(DatabaseError):
    """Raised if several tombstones are to be written at once on a database other than PostgreSQL.

    The effects of a failed batch depend on the database, so the caller divides the batch.
    """


def _insert(connection: BaseDatabaseWrapper, transaction_ids: Sequence[UUID], *, ledger_id: UUID) -> set[UUID]:
    """Write tombstones and return their ids.

    The tombstones are written only if the ledger still has this `ledger_id`, and if pruning has not reached the ids.
    """
    if connection.vendor == "postgresql":
        return ledger.insert_tombstones(
            connection, transaction_ids, ledger_id=ledger_id, lock_timeout_milliseconds=LOCK_TIMEOUT_MILLISECONDS
        )
    if len(transaction_ids) > 1:
        raise _OneAtATime
    written = ledger.insert_tombstone(connection, transaction_ids[0], ledger_id=ledger_id)
    return set(transaction_ids) if written else set()


def _after_conflict(connection: BaseDatabaseWrapper, checks: Sequence[Check]) -> Iterator[Answer]:
    """Answer from the ledger rows that were committed meanwhile.

    Run the barrier again for the checks whose transactions still have no ledger row.
    """
    states = _states(connection, checks)
    rest = [check for check in checks if check.transaction_id not in states]
    for check in checks:
        if check.transaction_id in states:
            yield _decided(check, states[check.transaction_id])
    if len(rest) == len(checks):
        # The row with which the INSERT collided no longer exists, so this attempt proves nothing.
        yield from (_unknown(check, "the ledger changed while it was read", counts=False) for check in rest)
    elif rest:
        yield from _barrier(connection, rest)


# -- answers ----------------------------------------------------------------------------------------


def _decided(check: Check, state: str) -> Answer:
    decision = _DECISIONS[state]
    return Answer(transaction_id=check.transaction_id, decision=decision, detail=f"the ledger says {decision.name}")


def _all_unknown(checks: Sequence[Check], error: DatabaseError) -> Iterator[Answer]:
    reason = STILL_RUNNING if is_contention(error) else "the ledger could not be read"
    return (_unknown(check, f"{reason}: {shown_text(error)}", counts=False) for check in checks)


def _elsewhere(check: Check, aliases: Iterable[str], unreadable: Sequence[str]) -> Answer:
    if unreadable:
        return _unknown(check, f"these ledgers cannot be read: {', '.join(unreadable)}", counts=False)
    return _unknown(
        check,
        f"ledger {check.ledger_id} is not one of this project's ledgers ({', '.join(aliases)}). Either this ledger was "
        f"emptied, or another service uses the producer group {check.producer_group!r}, or an alias leads to another "
        "database",
        counts=False,
        alarm=True,
    )


def _unknown(check: Check, detail: str, *, counts: bool = True, alarm: bool = False) -> Answer:
    return Answer(
        transaction_id=check.transaction_id, decision=Decision.UNKNOWN, detail=detail, counts=counts, alarm=alarm
    )
