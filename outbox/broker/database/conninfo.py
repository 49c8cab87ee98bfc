"""Reading libpq connection strings without ever repeating what they hold."""

from __future__ import annotations

import re
from typing import Any, Final

import psycopg
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from outbox.errors import ConfigurationError
from outbox.safe_text import MASK

_REMEDY: Final = (
    "write it as postgresql://user:password@host:5432/database, with %40 for @, %2F for / and %3A for : in user and "
    "password."
)
_SECRET: Final = re.compile(r"password|secret|scram_.*_key")
# What libpq quotes is a piece of the string, perhaps of the password.
_QUOTED: Final = re.compile(r'".*"', re.DOTALL)
# What libpq takes for the user's part of a URL, then what it takes for hosts and database.
_URL: Final = re.compile(r"postgres(?:ql)?://(?:[^@/]*@)?([^?]*)")


def read_conninfo(text: str, what: str) -> dict[str, Any]:
    """The parameters of a connection string or URL.

    Raises ConfigurationError, which begins with `what`, for one that cannot be read, and for one that can but means
    something else than was meant: an unescaped @ or / in a password makes libpq take a piece of it for the host, the
    port or the database, and name it in its errors.
    """
    try:
        found = conninfo_to_dict(text)
    except psycopg.Error as error:
        # Not chained: a traceback would show libpq's own text.
        reason = _QUOTED.sub('"…"', str(error).strip())
        raise ConfigurationError(f"{what} cannot be read ({reason}): {_REMEDY}") from None
    url = _URL.match(text)
    if url and "@" in url[1]:
        raise ConfigurationError(f"{what} has an unescaped @ or / before its host: {_REMEDY}")
    if not re.fullmatch(r"[\d,]*", str(found.get("port") or "")):
        raise ConfigurationError(f"{what} has a port that is no number: {_REMEDY}")
    return found


def without_secrets(text: str) -> str:
    """A connection string that can be read, with *** for its secrets."""
    shown: dict[str, Any] = {
        name: MASK if _SECRET.search(name) else value for name, value in conninfo_to_dict(text).items()
    }
    return make_conninfo(**shown)
