"""Recognizes the errors with which a database refuses another connection, because its limit is reached.

No message has caused such an error, and the next connection may succeed. So outbox waits, and the call of a handler
that failed with it does not count as an attempt.
"""

from __future__ import annotations

from typing import Final

from outbox.utils.causes import causes
from outbox.utils.safe_text import shown_text

# libpq gives no SQLSTATE for an error of a connection that it could not open, so the text decides. A server whose
# `lc_messages` is another language than English is not recognized.
_TEXTS: Final = (
    # PostgreSQL: max_connections, the slots for superusers, and the limits of a role and of a database.
    "too many clients already",
    "remaining connection slots are reserved",
    "too many connections",
    # PgBouncer, and the poolers of cloud providers.
    "no more connections allowed",
    "max client connections reached",
    "max clients reached",
)
_STATE: Final = "53300"
# MariaDB: ER_CON_COUNT_ERROR, ER_TOO_MANY_USER_CONNECTIONS and ER_USER_LIMIT_REACHED.
_MARIADB_NUMBERS: Final = (1040, 1203, 1226)
# psycopg_pool: no connection of the pool became free in time.
_POOL: Final = ("psycopg_pool", ("PoolTimeout", "TooManyRequests"))


def is_refused(error: BaseException) -> bool:
    """Whether the error, or one of its causes, says that a database or its pool has no free connection."""
    return any(_is_refusal(one) for one in causes(error, contexts=True))


def says_refused(text: str) -> bool:
    """Whether the text of an error says that a database has no free connection."""
    return any(one in text.lower() for one in _TEXTS)


def _is_refusal(error: BaseException) -> bool:
    try:
        return _is_refusal_of_driver(error)
    except Exception:
        # An attribute of another error, or the name of its class, may be a property that raises.
        return False


def _is_refusal_of_driver(error: BaseException) -> bool:
    kind = type(error)
    if kind.__module__.startswith(_POOL[0]) and kind.__name__ in _POOL[1]:
        return True
    # The class hierarchy of the database API (PEP 249) is the same in every driver; other errors may quote such a text.
    if not any(base.__name__ == "OperationalError" for base in kind.__mro__):
        return False
    number = error.args[0] if error.args else None
    return getattr(error, "sqlstate", None) == _STATE or number in _MARIADB_NUMBERS or says_refused(shown_text(error))
