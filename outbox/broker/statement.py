"""SQL texts with the broker's schema still open."""

from __future__ import annotations

import re
from typing import Final, LiteralString

from psycopg import sql

from outbox.errors import ConfigurationError

# Channel names are made of the schema's name and must fit PostgreSQL's 63 bytes.
_SCHEMA: Final = re.compile(r"[a-z_][a-z0-9_]{0,47}")


class Statement:
    """One SQL statement written with `{schema}` before every table of the broker."""

    __slots__ = ("_cache", "_text")

    def __init__(self, text: LiteralString) -> None:
        self._text = text
        self._cache: dict[str, bytes] = {}

    def on(self, schema: str) -> bytes:
        """The statement for one schema. Raises ConfigurationError when the schema's name is not allowed."""
        text = self._cache.get(schema)
        if text is None:
            text = sql.SQL(self._text).format(schema=sql.Identifier(check_schema_name(schema))).as_bytes(None)
            self._cache[schema] = text
        return text


def check_schema_name(schema: str) -> str:
    """Return `schema`, or raise ConfigurationError."""
    if not _SCHEMA.fullmatch(schema):
        raise ConfigurationError(
            f"the broker's schema {schema!r} is not allowed: use 1 to 48 lower-case letters, digits or '_', "
            f"not beginning with a digit."
        )
    return schema
