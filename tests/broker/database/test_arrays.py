"""The packed arrays have the elements that psycopg's own dumpers would send."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

from psycopg.types.json import Jsonb

from outbox.broker.database import arrays
from outbox.broker.database.connection import BrokerConnection
from outbox.broker.database.executor import BinaryValue, Executor
from outbox.broker.database.statement import Statement

ID = UUID("01a20786-33b5-7750-8cee-7a36cfabe58b")
NOON = datetime(2026, 5, 1, 12, 0, 0, 1, tzinfo=UTC)

# The function, the values, the values for psycopg, and the statement that shows the array.
ARRAYS: list[tuple[Callable[[Any], BinaryValue], list[Any], list[Any], Statement]] = [
    (arrays.uuids, [ID], [ID], Statement("SELECT %(given)s::uuid[]::text")),
    (arrays.texts, ["a", "ü{,}\"'", ""], ["a", "ü{,}\"'", ""], Statement("SELECT %(given)s::text[]::text")),
    (arrays.blobs, [b"\x00\xff", b""], [b"\x00\xff", b""], Statement("SELECT %(given)s::bytea[]::text")),
    (arrays.integers, [1, -(2**31)], [1, -(2**31)], Statement("SELECT %(given)s::integer[]::text")),
    (arrays.bigints, [1, 2**40], [1, 2**40], Statement("SELECT %(given)s::bigint[]::text")),
    (arrays.xids, [3, 2**63 + 1], ["3", str(2**63 + 1)], Statement("SELECT %(given)s::xid8[]::text")),
    (arrays.optional_integers, [3, None], [3, None], Statement("SELECT %(given)s::integer[]::text")),
    (arrays.times, [NOON, None], [NOON, None], Statement("SELECT %(given)s::timestamptz[]::text")),
    (arrays.durations, [timedelta(seconds=1.5), None], [1.5, None], Statement("SELECT %(given)s::float8[]::text")),
    (
        arrays.header_maps,
        [{"a": "ü\"'{}"}, {}],
        [Jsonb({"a": "ü\"'{}"}), None],
        Statement("SELECT %(given)s::jsonb[]::text"),
    ),
]


def test_arrays_have_the_elements_that_psycopg_sends(connection: BrokerConnection) -> None:
    run = Executor(connection, "outbox")
    for encode, values, plain, shown in ARRAYS:
        for given, expected in ((values, plain), ([], [])):
            assert run.one(shown, {"given": encode(given)}) == run.one(shown, {"given": expected}), encode.__name__
