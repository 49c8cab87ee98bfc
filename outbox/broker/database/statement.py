"""SQL texts with a placeholder for the broker's schema, and the types of their values.

    _ADD = Statement("INSERT INTO {schema}.t (id, name) VALUES ($1, $2) RETURNING n", (UUID_, TEXT), (INTEGER,))

A statement on a hot path declares its types. The sender (sender.py) then needs no cursor of psycopg, which would find
out the type of each value on each execution, and often leave the type to the server. Parameters are numbered, or named
(`%(name)s`) if a cursor executes the statement, too. An `Executor` executes all other statements.
"""

from __future__ import annotations

import operator
import re
import struct
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Final, LiteralString

from psycopg import sql
from psycopg.pq import Format

from outbox.errors import ConfigurationError

# Channel names contain the schema's name and must fit into PostgreSQL's 63 bytes.
_SCHEMA: Final = re.compile(r"[a-z_][a-z0-9_]{0,47}")
_PARAMETER: Final = re.compile(rb"%(?:\((\w+)\)s|%)")
_NAME: Final = re.compile(r"%\((\w+)\)s")
_EPOCH: Final = datetime(2000, 1, 1, tzinfo=UTC)
_MICROSECOND: Final = timedelta(microseconds=1)
# The errors of a value that does not have the declared type. psycopg then sends the value.
_OTHER_TYPE: Final = (TypeError, ValueError, AttributeError, OverflowError, struct.error)


def _not_needed(_: Any) -> Any:
    raise NotImplementedError


@dataclass(frozen=True, slots=True)
class Type:
    """A type of PostgreSQL: its oid, the binary form of a value, and the value of a text form."""

    oid: int
    dump: Callable[[Any], bytes] = _not_needed
    load: Callable[[bytes], Any] = _not_needed


def _dump_time(moment: datetime) -> bytes:
    return struct.pack("!q", (moment - _EPOCH) // _MICROSECOND)


BOOLEAN: Final = Type(16, struct.Struct("?").pack, b"t".__eq__)
BYTEA: Final = Type(17, bytes)
BIGINT: Final = Type(20, struct.Struct("!q").pack, int)
INTEGER: Final = Type(23, struct.Struct("!i").pack, int)
TEXT: Final = Type(25, str.encode, bytes.decode)
OID: Final = Type(26, struct.Struct("!I").pack, int)
FLOAT8: Final = Type(701, struct.Struct("!d").pack, float)
TIMESTAMPTZ: Final = Type(1184, _dump_time)
UUID_: Final = Type(2950, operator.attrgetter("bytes"), lambda text: uuid.UUID(text.decode()))


class Statement:
    """One SQL statement written with `{schema}` before every table of the broker.

    `parameters` and `columns`: the types of its parameters and of the columns of its rows, if it declares them. The
    types of named parameters are given by name.
    """

    __slots__ = ("dumps", "formats", "loads", "oids", "text", "texts")

    def __init__(
        self,
        text: LiteralString,
        parameters: Sequence[Type] | Mapping[str, Type] = (),
        columns: Sequence[Type] = (),
    ) -> None:
        self.text = text
        if isinstance(parameters, Mapping):
            # In the order of the numbers that `on` gives the names.
            parameters = [parameters[name] for name in dict.fromkeys(_NAME.findall(text))]
        # What `on` has returned, by schema.
        self.texts: dict[str, tuple[bytes, tuple[str, ...]]] = {}
        self.oids = [parameter.oid for parameter in parameters]
        self.formats = [Format.BINARY] * len(parameters)
        self.dumps = [parameter.dump for parameter in parameters]
        self.loads = [column.load for column in columns]

    def on(self, schema: str) -> tuple[bytes, tuple[str, ...]]:
        """Return the statement for one schema, with `$1` for `%(name)s`, and the names in the order of the numbers.

        psycopg would translate a statement of more than 4 KB anew on every execution. Raises ConfigurationError when
        the schema's name is not allowed.
        """
        found = self.texts.get(schema)
        if found is None:
            named = sql.SQL(self.text).format(schema=sql.Identifier(check_schema_name(schema))).as_bytes(None)
            names: list[str] = []
            text = _PARAMETER.sub(lambda match: _number(match, names), named)
            found = self.texts[schema] = (text, tuple(names))
        return found

    def dumped(self, values: Sequence[Any]) -> list[bytes | None] | None:
        """Return the binary forms of the values; None if a value does not have the declared type."""
        dumped: list[bytes | None] = []
        try:
            for dump, value in zip(self.dumps, values, strict=True):
                dumped.append(None if value is None else dump(value))
        except _OTHER_TYPE:
            return None
        return dumped

    def dumped_all(self, values: Sequence[Any]) -> list[bytes | None]:
        """Return the binary forms of the values. Raises TypeError if a value does not have the declared type."""
        dumped = self.dumped(values)
        if dumped is None:
            raise TypeError(f"the values {values!r} do not have the types of the statement {self.text}")
        return dumped

    def request(self, schema: str, values: Sequence[Any], what: str) -> Request:
        """Return the statement with its values as a request."""
        return Request(self.on(schema)[0], tuple(self.dumped_all(values)), what, oids=tuple(self.oids))


@dataclass(frozen=True, slots=True)
class Request:
    """A statement with its values in binary form, which is executed as a separate transaction without waiting for it.

    If the connection breaks, the request may be executed twice. `what` names the request in the log. `is_said_once`: if
    several equal requests are written together, only the last of them is sent.
    """

    text: bytes
    values: tuple[bytes | None, ...]
    what: str
    is_said_once: bool = False
    oids: tuple[int, ...] = ()


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
