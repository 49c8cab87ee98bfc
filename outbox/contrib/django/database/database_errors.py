"""Turns errors of the application's database into errors that name the message and the remedy."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.utils import Error

from outbox.contrib.django.database.contention import was_in_the_way
from outbox.errors import SendFailed

_AGAIN: Final = "run the whole operation again, in a new transaction"

# By SQLSTATE, or by its class (the first two characters).
_STATES: Final = {
    "42501": ("its role lacks a right", "grant it (docs/operations.md), then run the whole operation again"),
    "25006": ("it is read-only (a replica?)", "let the alias lead to the primary"),
    "53": ("it is short of disk, memory or connections", f"free or add some, then {_AGAIN}"),
    "55P03": ("another transaction has held a lock for too long", _AGAIN),
    "57014": ("the statement took longer than statement_timeout, or was cancelled", _AGAIN),
    "08": ("the connection broke", _AGAIN),
    "57": ("the connection was ended", _AGAIN),
}
# By SQLite's primary result code.
_SQLITE_CODES: Final = {8: _STATES["25006"], 13: _STATES["53"]}


@contextmanager
def naming(what: str, connection: BaseDatabaseWrapper) -> Iterator[None]:
    """Raise SendFailed, naming the operation that failed, from any error of Django or its driver."""
    try:
        with connection.wrap_database_errors:
            yield
    except Error as error:
        reason, remedy = _judged(error)
        raise SendFailed(
            f"{what} was not done: the database {connection.alias!r} failed it, {reason}: {str(error).strip()}. The "
            f"surrounding transaction is rolled back and nothing is published; {remedy}."
        ) from error


def _judged(error: Error) -> tuple[str, str]:
    if was_in_the_way(error):
        return "another transaction conflicted with it", _AGAIN
    cause = error.__cause__
    state = getattr(cause, "sqlstate", None) or ""
    known = _STATES.get(state) or _STATES.get(state[:2])
    if known is None:
        known = _SQLITE_CODES.get(getattr(cause, "sqlite_errorcode", 0) & 0xFF)
    if known is None:
        known = (
            ("the connection broke", _AGAIN)
            if not state
            else ("it refused the statement", "correct the cause that it names")
        )
    return known
