"""Read libpq connection strings without repeating their contents in an error."""

from __future__ import annotations

import re
from typing import Any, Final

import psycopg
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from outbox.errors import ConfigurationError
from outbox.utils.safe_text import MASK

_REMEDY: Final = (
    "write it as postgresql://user:password@host:5432/database, with %40 for @, %2F for / and %3A for : in user and "
    "password."
)
_SECRET: Final = re.compile(r"password|secret|scram_.*_key")
# libpq quotes parts of the string in its errors, and a part may belong to the password.
_QUOTED: Final = re.compile(r'".*"', re.DOTALL)
# The part of a URL that libpq reads as the user, then the part that it reads as hosts and database.
_URL: Final = re.compile(r"postgres(?:ql)?://(?:[^@/]*@)?([^?]*)")


def read_conninfo(text: str, what: str) -> dict[str, Any]:
    """Return the parameters of a connection string or URL.

    Raises ConfigurationError, whose text begins with `what`, for a string that cannot be read. It raises the same error
    for a string with an unescaped @ or / in the password: libpq would read a part of that password as host, port or
    database and name it in its errors.
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
    """Return a readable connection string with *** in place of its secrets."""
    shown: dict[str, Any] = {
        name: MASK if _SECRET.search(name) else value for name, value in conninfo_to_dict(text).items()
    }
    return make_conninfo(**shown)
