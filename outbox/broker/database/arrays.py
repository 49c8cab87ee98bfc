"""Encode the columns of a batch as PostgreSQL arrays in binary form.

The code packs the arrays by hand: psycopg's general list dumper takes more CPU per element than PostgreSQL takes to
store that element. The format is described in src/backend/utils/adt/arrayfuncs.c, array_recv. A cast in the statement
names the type of the array.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from functools import partial
from itertools import chain, repeat
from typing import Final
from uuid import UUID

from outbox.broker.database.executor import BinaryValue
from outbox.broker.database.statement import Type

_HEADER: Final = struct.Struct("!iiIii")
_LENGTH: Final = struct.Struct("!i").pack
_EPOCH: Final = datetime(2000, 1, 1, tzinfo=UTC)
_MICROSECOND: Final = timedelta(microseconds=1)
_NULL: Final = b"\xff\xff\xff\xff"

_INT4, _INT8, _TEXT, _BYTEA, _UUID, _TIMESTAMPTZ, _JSONB, _XID8, _FLOAT8 = 23, 20, 25, 17, 2950, 1184, 3802, 5069, 701


def uuids(values: Sequence[UUID]) -> BinaryValue:
    """uuid[]"""
    return _array(_UUID, len(values), b"".join([b"\x00\x00\x00\x10" + value.bytes for value in values]))


# The type of a parameter of a statement that declares its types.
UUIDS: Final = Type(2951, uuids)


def texts(values: Iterable[str]) -> BinaryValue:
    """text[]"""
    return _blobs(_TEXT, [value.encode() for value in values])


def blobs(values: Sequence[bytes]) -> BinaryValue:
    """bytea[]"""
    return _blobs(_BYTEA, values)


def _numbers(oid: int, size: int, letter: str, values: Sequence[int]) -> BinaryValue:
    # `letter` is that of `struct` for a number of `size` bytes. Each number follows its size.
    packed = struct.pack(f"!{f'i{letter}' * len(values)}", *chain.from_iterable(zip(repeat(size), values)))
    return _array(oid, len(values), packed)


# Functions that return an integer[], a bigint[] or an xid8[]. A `partial` takes no Python frame of its own.
integers: Final[Callable[[Sequence[int]], BinaryValue]] = partial(_numbers, _INT4, 4, "i")
bigints: Final[Callable[[Sequence[int]], BinaryValue]] = partial(_numbers, _INT8, 8, "q")
xids: Final[Callable[[Sequence[int]], BinaryValue]] = partial(_numbers, _XID8, 8, "Q")

# The types of parameters of a statement that declares its types.
INTEGERS: Final = Type(1007, integers)
BIGINTS: Final = Type(1016, bigints)


def optional_integers(values: Sequence[int | None]) -> BinaryValue:
    """Return an integer[]; it is empty when all values are null, because unnest() fills missing elements with nulls."""
    if None not in values:
        return integers([value for value in values if value is not None])
    return _optional(_INT4, [None if value is None else struct.pack("!i", value) for value in values])


def times(values: Sequence[datetime | None]) -> BinaryValue:
    """Return a timestamptz[]; it is empty when all values are null."""
    return _optional(
        _TIMESTAMPTZ,
        [None if value is None else struct.pack("!q", (value - _EPOCH) // _MICROSECOND) for value in values],
    )


def durations(values: Sequence[timedelta | None]) -> BinaryValue:
    """Return a float8[] of seconds; it is empty when all values are null."""
    return _optional(_FLOAT8, [None if value is None else struct.pack("!d", value.total_seconds()) for value in values])


def header_maps(values: Sequence[Mapping[str, str]]) -> BinaryValue:
    """Return a jsonb[] with null for a message without headers; it is empty when all values are null."""
    return _optional(_JSONB, [b"\x01" + dump_headers(value).encode() if value else None for value in values])


def dump_headers(headers: Mapping[str, str]) -> str:
    """Return the headers in the form in which they are stored."""
    return json.dumps(dict(headers), ensure_ascii=False, separators=(",", ":"))


def _blobs(oid: int, values: Sequence[bytes]) -> BinaryValue:
    return _array(oid, len(values), b"".join([part for value in values for part in (_LENGTH(len(value)), value)]))


def _optional(oid: int, values: Sequence[bytes | None]) -> BinaryValue:
    if not any(value is not None for value in values):
        return _array(oid, 0, b"")
    parts = [_NULL if value is None else _LENGTH(len(value)) + value for value in values]
    return _array(oid, len(values), b"".join(parts), has_nulls=True)


def _array(oid: int, count: int, elements: bytes, *, has_nulls: bool = False) -> BinaryValue:
    if not count:
        return BinaryValue(struct.pack("!iiI", 0, 0, oid))
    return BinaryValue(_HEADER.pack(1, int(has_nulls), oid, count, 1) + elements)
