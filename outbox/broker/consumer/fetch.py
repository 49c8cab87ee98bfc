"""Fetch messages for all owned queues in one statement.

The query plan must not depend on the statistics of fast-growing tables. So each step is a correlated subquery that
PostgreSQL can answer only by primary key. The first step finds entries by (queue, offset), and the second step finds
messages by log id.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from types import MappingProxyType
from typing import Any, Final, Generic

import psycopg
from psycopg import sql

from outbox.broker.consumer.owned_queue import OwnedQueue, Subscribed
from outbox.broker.database import arrays
from outbox.broker.database.executor import Executor, cursor_on
from outbox.broker.database.statement import Statement
from outbox.codec import UnreadBody
from outbox.filters.conditions import (
    NUMBER,
    TAG_NAME,
    Between,
    Comparison,
    FilterNode,
    HeaderComparison,
    IsNull,
    Junction,
    Like,
    Membership,
    Not,
    Value,
)
from outbox.filters.filter import Filter
from outbox.message import Body_co, Delivery, Message
from outbox.time_limit import TIMEOUT_HEADER, TIMEOUT_PATTERN

# -- filters ---------------------------------------------------------------------------------------
#
# The database evaluates these filters as SQL. `outbox.filters.filter` evaluates the same expression tree in Python.


_NUMBER_PATTERN: Final = f"^({NUMBER})$"


@dataclass
class FilterSql:
    """Builds SQL conditions on the log row `l`.

    The object puts the values into `parameters`, under names that begin with `prefix`.
    """

    prefix: str = "f"
    parameters: dict[str, Any] = field(default_factory=dict)

    def condition(self, wanted: Filter) -> sql.Composable:
        """Return the filter as an SQL condition that is never NULL."""
        if wanted.tags:
            return sql.SQL("l.tag = ANY({}::text[])").format(self._bind(list(wanted.tags)))
        if wanted.condition is None:
            return sql.SQL("true")
        return sql.SQL("(({}) IS TRUE)").format(self._render(wanted.condition))

    def _bind(self, value: Any) -> sql.Placeholder:
        name = f"{self.prefix}{len(self.parameters)}"
        self.parameters[name] = value
        return sql.Placeholder(name)

    def _text(self, name: str) -> sql.Composable:
        if name == TAG_NAME:
            return sql.SQL("""nullif(l.tag, '') COLLATE "C" """)
        return sql.SQL("""((l.headers ->> {}::text) COLLATE "C") """).format(self._bind(name))

    def _operand(self, name: str, like: Value) -> sql.Composable:
        if not isinstance(like, Decimal):
            return self._text(name)
        # CASE guarantees that PostgreSQL casts only texts that are numbers.
        return sql.SQL("CASE WHEN {} ~ {}::text THEN ({})::numeric END").format(
            self._text(name), self._bind(_NUMBER_PATTERN), self._text(name)
        )

    def _value(self, value: Value) -> sql.Composable:
        kind = sql.SQL("{}::numeric" if isinstance(value, Decimal) else "{}::text")
        return kind.format(self._bind(value))

    def _render(self, node: FilterNode) -> sql.Composable:
        match node:
            case Comparison(name, operator, value):
                return sql.SQL("({} {} {})").format(
                    self._operand(name, value), _OPERATORS[operator], self._value(value)
                )
            case HeaderComparison(name, operator, other):
                return sql.SQL("({} {} {})").format(self._text(name), _OPERATORS[operator], self._text(other))
            case Between(name, low, high):
                return sql.SQL("({} BETWEEN {} AND {})").format(
                    self._operand(name, low), self._value(low), self._value(high)
                )
            case Membership(name, values):
                kind = sql.SQL("numeric[]" if isinstance(values[0], Decimal) else "text[]")
                return sql.SQL("({} = ANY({}::{}))").format(
                    self._operand(name, values[0]), self._bind(list(values)), kind
                )
            case Like(name, pattern, escape):
                return sql.SQL("({} LIKE {}::text ESCAPE {}::text)").format(
                    self._text(name), self._bind(pattern), self._bind(escape)
                )
            case IsNull(name):
                return sql.SQL("({} IS NULL)").format(self._text(name))
            case Not(inner):
                return sql.SQL("(NOT {})").format(self._render(inner))
            case Junction(word, conditions):
                joiner = sql.SQL(" AND " if word == "AND" else " OR ")
                return sql.SQL("({})").format(joiner.join([self._render(inner) for inner in conditions]))
        raise AssertionError(f"no SQL for {node!r}")


_OPERATORS: Final = {operator: sql.SQL(operator) for operator in ("=", "<>", "<", "<=", ">", ">=")}


# -- fetching --------------------------------------------------------------------------------------


Row = tuple[Any, ...]
# The positions of columns of _FETCH and _LOAD; `deliver` unpacks the other columns. Access by position is fast, and
# this code runs for every message.
SLOT, OFFSET, RETRIES, LOG_ID, TOPIC_ID, PASSES, BODY, MESSAGE_ID, KEY = range(9)
HEADERS, CONTENT_TYPE, BORN_AT = range(10, 13)
# How many seconds were left, by the clock of the broker's database, until the end of the message's time limit. The
# value is NULL if the message has no time limit, and not positive after the end of the limit.
SECONDS_LEFT: Final = 15
# The position of the last column, the transaction id. The column is NULL if the transaction id equals the message id,
# as for a message that is published alone.
TRANSACTION_ID: Final = -1

# The consumer does not buffer a body that is larger than this number of bytes. The consumer loads a larger body right
# before it calls the handler.
LARGEST_BUFFERED_BODY: Final = 16 * 1024

# CASE guarantees that PostgreSQL casts only texts that are numbers. Without the header, PostgreSQL computes only the
# first operand. Before version 17, PostgreSQL cannot subtract infinite times, only their seconds.
_SECONDS_LEFT: Final = f"""
       CASE WHEN (l.headers ->> '{TIMEOUT_HEADER}') ~ '{TIMEOUT_PATTERN}'
            THEN (extract(epoch FROM greatest(l.stored_at, l.deliver_at)) - extract(epoch FROM clock_timestamp())
                  + (l.headers ->> '{TIMEOUT_HEADER}')::numeric)::float8 END,
""".replace("{", "{{").replace("}", "}}")

# Python cannot hold -infinity, nor years before 1 and after 9999, and one such row would fail the whole fetch. So
# born_at is NULL for a message with such a time, which `unreadable` then refuses. It also refuses headers that Python
# cannot load (see `_ContainedJson`). No value of the other types is known that fails to load: integers, booleans, UUIDs
# and bytes always load, a text is valid UTF-8 or the database has refused it, and _SECONDS_LEFT casts short numbers
# only. So a process whose fetch fails need not search for a row that is to blame.
_RANGE: Final = "BETWEEN '0001-01-02 UTC'::timestamptz AND '9999-12-30 UTC'::timestamptz"
_TIMES: Final = f"""
       CASE WHEN l.born_at {_RANGE} AND (l.deliver_at {_RANGE}) IS NOT FALSE THEN l.born_at END,
       CASE WHEN l.deliver_at {_RANGE} THEN l.deliver_at END"""

_FETCH: Final = """
SELECT w.slot, e.queue_offset, e.attempt, e.log_id, l.topic_id, l.passes,
       CASE WHEN l.passes AND octet_length(l.body) <= %(largest)s THEN l.body END,
       l.message_id, l.key, l.tag, l.headers, l.content_type, {times}, l.shard,
       {seconds_left} nullif(l.transaction_id, l.message_id)
FROM unnest(%(queue_ids)s::integer[], %(starts)s::bigint[], %(limits)s::integer[], %(filters)s::integer[])
    WITH ORDINALITY AS w (queue_id, start, row_limit, filter, slot)
CROSS JOIN LATERAL (
    SELECT queue_offset, log_id, attempt FROM {schema}.consume_queue
    WHERE queue_id = w.queue_id AND queue_offset >= w.start
    ORDER BY queue_offset
    LIMIT w.row_limit
) AS e
LEFT JOIN LATERAL (
    SELECT l.*, {passes} AS passes FROM {schema}.commit_log l WHERE l.log_id = e.log_id OFFSET 0
) AS l ON true
"""


class Fetcher:
    """The fetch statement, with the filters of some subscriptions.

    Each filter has a number in the statement; the number 0 means "no filter".
    """

    def __init__(self, subscriptions: Iterable[Subscribed]) -> None:
        builder = FilterSql()
        filtered = [subscribed for subscribed in subscriptions if not subscribed.filter.passes_all]
        cases = [
            sql.SQL("WHEN {} THEN {}").format(sql.Literal(number), builder.condition(subscribed.filter))
            for number, subscribed in enumerate(filtered, start=1)
        ]
        passes = (
            sql.SQL("CASE w.filter {} ELSE true END").format(sql.SQL(" ").join(cases)) if cases else sql.SQL("true")
        )
        # The values of filters are parameters, so the inserted text has no braces that `Statement` could replace.
        self._statement = Statement(
            _FETCH.replace("{passes}", passes.as_string(None))
            .replace("{seconds_left}", _SECONDS_LEFT)
            .replace("{times}", _TIMES)
        )
        self._parameters: dict[str, Any] = {**builder.parameters, "largest": LARGEST_BUFFERED_BODY}
        # The wanted queues of the last call, and its parameters. While few messages arrive, the next call often wants
        # the same queues, and then reuses the parameters.
        self._wanted: Sequence[tuple[OwnedQueue, int]] = ()
        self._numbers: dict[Subscribed | None, int] = {
            subscribed: number for number, subscribed in enumerate(filtered, start=1)
        }
        # Keep the cursor: if few messages arrive, the statement runs once per message, and a new cursor costs as much
        # as the statement.
        self._cursor: psycopg.RawCursor[Row] | None = None

    def fetch(self, run: Executor, wanted: Sequence[tuple[OwnedQueue, int]]) -> list[Row]:
        """Execute the statement of `request`, and return its rows."""
        statement, parameters = self.request(wanted)
        text, names = statement.on(run.schema)
        if self._cursor is None or self._cursor.connection is not run.connection:
            self._cursor = cursor_on(run.connection, contains_times=False)
        return self._cursor.execute(text, [parameters[name] for name in names]).fetchall()

    def request(self, wanted: Sequence[tuple[OwnedQueue, int]]) -> tuple[Statement, Mapping[str, Any]]:
        """Return the fetch statement and its parameters. The next call of this method changes the parameters.

        The rows are those of each wanted queue at or above its `fetch_from`, queue by queue, in the order of offsets.
        `SLOT` is the position of the queue in `wanted`, from 1. The queue id cannot replace the slot, because several
        groups of this process may want the same queue. A row without `TOPIC_ID` refers to a message that retention
        removed. A row with `PASSES` false did not pass the filter. If a row passes but has no body, its body is large,
        and `load` returns the body.
        """
        if wanted != self._wanted:
            self._wanted = wanted
            self._parameters |= {
                "queue_ids": arrays.integers([queue.key[1] for queue, _ in wanted]),
                "limits": arrays.integers([limit for _, limit in wanted]),
                "filters": arrays.integers([self._numbers.get(queue.subscribed, 0) for queue, _ in wanted]),
            }
        self._parameters["starts"] = arrays.bigints([queue.fetch_from for queue, _ in wanted])
        return self._statement, self._parameters


_LOAD = Statement(
    """
SELECT e.queue_id, e.queue_offset, e.attempt, e.log_id, l.topic_id, true,
       l.body, l.message_id, l.key, l.tag, l.headers, l.content_type, """
    + _TIMES
    + """, l.shard,"""
    + _SECONDS_LEFT
    + """ nullif(l.transaction_id, l.message_id)
FROM unnest(%(queue_ids)s::integer[], %(offsets)s::bigint[]) AS w (queue_id, queue_offset)
CROSS JOIN LATERAL (
    SELECT * FROM {schema}.consume_queue e
    WHERE e.queue_id = w.queue_id AND e.queue_offset = w.queue_offset
    OFFSET 0
) AS e
CROSS JOIN LATERAL (SELECT * FROM {schema}.commit_log l WHERE l.log_id = e.log_id OFFSET 0) AS l
"""
)


def load(run: Executor, places: Sequence[tuple[int, int]]) -> dict[tuple[int, int], Row]:
    """Return a dictionary from (queue id, offset) to the row, with bodies of any size.

    Messages that retention has removed are not in the result.
    """
    parameters = {
        "queue_ids": arrays.integers([queue_id for queue_id, _ in places]),
        "offsets": arrays.bigints([offset for _, offset in places]),
    }
    return {(row[SLOT], row[OFFSET]): row for row in run.execute(_LOAD, parameters)}


def unreadable(row: Row) -> str:
    """Return why no handler can get this message; '' if one can. Only code beside outbox stores such a row."""
    if row[BORN_AT] is None:
        return "its born_at or deliver_at is a time that Python cannot hold"
    headers = row[HEADERS]
    if headers is not None and (type(headers) is not dict or not set(map(type, headers.values())) <= _TEXTS):
        return "its headers are not an object of texts"
    return ""


_TEXTS: Final = frozenset({str})
NO_HEADERS: Final[Mapping[str, str]] = MappingProxyType({})


# The constructors of Message and Delivery would repeat the checks that the sender has made, and set each field by a
# call. Both together would take several times as much CPU as the fetch. So `deliver` fills objects of these two
# classes, whose fields are those of Message and Delivery but can be assigned. Then `deliver` changes their class, which
# Python allows because both classes have the same slots.


class _OpenMessage:
    __slots__ = tuple(Message.__dataclass_fields__)


class _OpenDelivery(Generic[Body_co]):
    # `_unread` stays without a value.
    __slots__ = tuple(Delivery.__dataclass_fields__)


def deliver(
    row: Row,
    topic: str,
    body: Any,
    group: str,
    queue: str,
    offset: int,
    attempt: int,
    decode: Callable[[Message], Any] | None = None,
) -> Delivery:
    """Return a `Delivery` with the message of this row and the decoded body. `decode` decodes the body once more."""
    _, _, _, _, _, _, encoded, message_id, key, tag, headers, content_type, born_at, deliver_at, shard, _, its = row
    # Typed as Any until they have their final classes.
    message: Any = _OpenMessage()
    message.topic = topic
    message.body = encoded
    message.message_id = message_id
    message.key = key
    message.tag = tag
    message.headers = NO_HEADERS if headers is None else MappingProxyType(headers)
    message.content_type = content_type
    message.deliver_at = deliver_at
    message.delay = None
    message.shard = shard
    message.born_at = born_at
    message.__class__ = Message
    delivery: Any = _OpenDelivery()
    delivery.message = message
    delivery.body = body
    delivery.group = group
    delivery.queue = queue
    delivery.offset = offset
    delivery.attempt = attempt
    delivery.transaction_id = its or message_id
    delivery._decode = decode
    delivery.__class__ = Delivery
    opened: Delivery = delivery
    if body.__class__ is UnreadBody:
        opened.__post_init__()
    return opened
