"""Explains the errors of a database, and repeats a transaction that another transaction has stopped."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final, TypeVar

from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.utils import DatabaseError, Error

from outbox.errors import SendFailed
from outbox.utils import fence
from outbox.utils.causes import causes
from outbox.utils.safe_text import shown_text

logger = logging.getLogger(__name__)


# -- naming errors ---------------------------------------------------------------------------------
#
# Turns errors of the application's database into errors that name the message and the remedy.


_AGAIN: Final = "run the whole operation again, in a new transaction"

# The reason and the remedy by SQLSTATE, or by the class of the SQLSTATE (its first two characters).
_STATES: Final = {
    "42501": (
        "the role lacks a right",
        "grant the right (docs/operations/connections.md#grant-rights), then run the whole operation again",
    ),
    "25006": ("the database is read-only (a replica?)", "connect the alias to the primary server"),
    "53": ("the server is short of disk, memory or connections", f"free or add capacity, then {_AGAIN}"),
    "55P03": ("another transaction has held a lock for too long", _AGAIN),
    "57014": ("the statement took longer than statement_timeout, or was cancelled", _AGAIN),
    "08": ("the connection broke", _AGAIN),
    "57": ("the connection was ended", _AGAIN),
}
# The reason and the remedy by SQLite's primary result code.
_SQLITE_CODES: Final = {8: _STATES["25006"], 13: _STATES["53"]}
# The reason and the remedy by MariaDB's error number.
_MARIADB_NUMBERS: Final = {
    **dict.fromkeys((1044, 1045, 1142, 1143, 1227), _STATES["42501"]),
    **dict.fromkeys((1290, 1792, 1836), _STATES["25006"]),
    **dict.fromkeys((1021, 1037, 1038, 1040, 1041, 1114, 1203, 1226), _STATES["53"]),
    **dict.fromkeys((1205, 1222), _STATES["55P03"]),
    **dict.fromkeys(
        (1317, 1969, 3024), ("the statement took longer than max_statement_time, or was cancelled", _AGAIN)
    ),
}


@contextmanager
def naming(what: str, connection: BaseDatabaseWrapper) -> Iterator[None]:
    """Turn a database error of Django or the driver into SendFailed, which names the failed operation."""
    try:
        with connection.wrap_database_errors:
            yield
    except Error as error:
        reason, remedy = _judged(error)
        raise SendFailed(
            f"{what} was not done: the database {connection.alias!r} reported an error, because {reason}: "
            f"{str(error).strip()}. The surrounding transaction is rolled back, and nothing is published. "
            f"Next step: {remedy}."
        ) from error


def _judged(error: Error) -> tuple[str, str]:
    if was_in_the_way(error):
        return "another transaction conflicted with this transaction", _AGAIN
    cause = error.__cause__
    state = getattr(cause, "sqlstate", None) or ""
    known = _STATES.get(state) or _STATES.get(state[:2])
    if known is None:
        known = _SQLITE_CODES.get(getattr(cause, "sqlite_errorcode", 0) & 0xFF)
    if known is None and (number := mariadb_number(error)):
        known = _MARIADB_NUMBERS.get(number)
        # The errors of the client (CR_...) have numbers from 2000 on. All of them say that the connection is gone.
        if known is None and not 2000 <= number < 3000:
            known = ("the database refused the statement", "correct the cause that the error names")
    if known is None:
        known = (
            ("the connection broke", _AGAIN)
            if not state
            else ("the database refused the statement", "correct the cause that the error names")
        )
    return known


def mariadb_number(error: BaseException) -> int:
    """Return MariaDB's error number of an error of Django; 0 for the errors of other databases."""
    number = error.args[0] if isinstance(error, Error) and error.args else 0
    return number if isinstance(number, int) else 0


# -- repeating after contention --------------------------------------------------------------------
#
# If another transaction has stopped the transaction of a handler, this code runs the handler again at once.
#
# If two transactions conflict (a serialisation failure, a deadlock), PostgreSQL ends one of them, and the client may
# repeat the transaction. The handler has made no error, and no effect of the handler remains. So the repetition does
# not count as an attempt, and does not wait in the retry queue.


Result = TypeVar("Result")

# PostgreSQL: serialization_failure and deadlock_detected. SQLite: SQLITE_BUSY and SQLITE_LOCKED.
_CONTENDED_STATES: Final = frozenset({"40001", "40P01"})
_CONTENDED_SQLITE_CODES: Final = frozenset({5, 6})
# MariaDB: ER_CHECKREAD (a row changed since the snapshot, under REPEATABLE READ) and ER_LOCK_DEADLOCK. After each of
# them the server has rolled the transaction back.
CONTENDED_MARIADB_NUMBERS: Final = frozenset({1020, 1213})
# PostgreSQL: lock_not_available. MariaDB: ER_LOCK_WAIT_TIMEOUT.
_LOCK_TIMEOUT_STATE: Final = "55P03"
LOCK_TIMEOUT_MARIADB_NUMBER: Final = 1205

MAX_TRIES: Final = 10
_LONGEST_PAUSE_SECONDS: Final = 0.1


def repeated(attempt: Callable[[], Result], name: str) -> Result:
    """Call `attempt`, up to ten times if another transaction stops each call. Return its result or raise its error."""
    for tries in range(1, MAX_TRIES):
        try:
            return attempt()
        except Exception as error:
            if not was_in_the_way(error) or fence.is_lost():
                raise
            logger.info(
                "%s conflicted with another transaction and starts again (%d): %s", name, tries, shown_text(error)
            )
        # The first repetition starts at once. Later repetitions wait for random times, so that the same transactions do
        # not conflict again.
        time.sleep(random.uniform(0, min(_LONGEST_PAUSE_SECONDS, 0.001 * (2**tries - 2))))
    return attempt()


def was_in_the_way(error: BaseException) -> bool:
    """Whether the error, or one of its causes, says that another transaction stopped the statement."""
    try:
        return any(map(_is_contended, causes(error)))
    except Exception:
        # The attributes of a handler's error may raise. No error of a database does so.
        return False


def _is_contended(error: BaseException | None) -> bool:
    return error is not None and (
        getattr(error, "sqlstate", None) in _CONTENDED_STATES
        or getattr(error, "sqlite_errorcode", 0) & 0xFF in _CONTENDED_SQLITE_CODES
        or mariadb_number(error) in CONTENDED_MARIADB_NUMBERS
    )


def is_contention(error: DatabaseError) -> bool:
    """Whether the statement may succeed after another transaction has ended, also if it has waited for a lock."""
    state = getattr(error.__cause__, "sqlstate", None)
    is_timeout = mariadb_number(error) == LOCK_TIMEOUT_MARIADB_NUMBER or (state is None and "locked" in str(error))
    return is_timeout or state == _LOCK_TIMEOUT_STATE or _is_contended(error) or _is_contended(error.__cause__)
