"""SQL texts with a placeholder for the broker's schema."""

from __future__ import annotations

import re
import uuid
from dataclasses import dataclass
from typing import Final, LiteralString

from psycopg import sql

from outbox.errors import ConfigurationError

# Channel names contain the schema's name and must fit into PostgreSQL's 63 bytes.
_SCHEMA: Final = re.compile(r"[a-z_][a-z0-9_]{0,47}")
_PARAMETER: Final = re.compile(rb"%(?:\((\w+)\)s|%)")


class Statement:
    """One SQL statement written with `{schema}` before every table of the broker."""

    __slots__ = ("_cache", "_numbered", "_text")

    def __init__(self, text: LiteralString) -> None:
        self._text = text
        self._cache: dict[str, bytes] = {}
        self._numbered: dict[str, tuple[bytes, tuple[str, ...]]] = {}

    def on(self, schema: str) -> bytes:
        """Return the statement for one schema. Raises ConfigurationError when the schema's name is not allowed."""
        text = self._cache.get(schema)
        if text is None:
            text = sql.SQL(self._text).format(schema=sql.Identifier(check_schema_name(schema))).as_bytes(None)
            self._cache[schema] = text
        return text

    def numbered(self, schema: str) -> tuple[bytes, tuple[str, ...]]:
        """Return the statement for a raw cursor, with `$1` for `%(name)s`, and the names in the order of the numbers.

        psycopg translates a statement of more than 4 KB anew on every execution.
        """
        found = self._numbered.get(schema)
        if found is None:
            names: list[str] = []
            text = _PARAMETER.sub(lambda match: _number(match, names), self.on(schema))
            found = self._numbered[schema] = (text, tuple(names))
        return found


@dataclass(frozen=True, slots=True)
class Request:
    """A statement with numbered parameters in text form, which is executed as a separate transaction.

    If the connection breaks, the request may be executed twice. `what` names the request in the log. `is_said_once`: if
    several equal requests are written together, only the last of them is sent.
    """

    text: bytes
    values: tuple[bytes | None, ...]
    what: str
    is_said_once: bool = False


def _number(match: re.Match[bytes], names: list[str]) -> bytes:
    if match[1] is None:
        return b"%"
    name = match[1].decode()
    if name not in names:
        names.append(name)
    return b"$%d" % (names.index(name) + 1)


def check_schema_name(schema: str) -> str:
    """Return `schema`, or raise ConfigurationError."""
    if not _SCHEMA.fullmatch(schema):
        raise ConfigurationError(
            f"the broker's schema {schema!r} is not allowed: use 1 to 48 lower-case letters, digits or '_', "
            f"not beginning with a digit."
        )
    return schema


def new_statement_name() -> bytes:
    """Return a name for a prepared statement.

    The name is random, so no other prepared statement has it, even behind an unknown pooler.
    """
    return b"outbox_%s" % uuid.uuid4().hex.encode()
