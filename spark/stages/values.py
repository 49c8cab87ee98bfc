"""A field's value in SQL, written alike by the rows' database and by the one that holds the messages: for checksums."""

from __future__ import annotations

from functools import reduce
from typing import Final

from ..rules.rule import FieldRule, FieldType
from ..sources import sql

_NULL: Final = "E'\\x1e'"
# As Python writes it, in a session whose zone is UTC.
_ISO_TIME: Final = """'YYYY-MM-DD"T"HH24:MI:SS.US"+00:00"'"""
_USUAL_TIMES: Final = "('-- ::', '-- ::.', '-- ::+:', '-- ::.+:', '-- ::-:', '-- ::.-:', '-- ::Z', '-- ::.Z')"


def hashed(texts: list[str]) -> str:
    """64 bits of all texts: each is hashed with the hash of those before it as the seed, so that none is copied.

    Only texts: PostgreSQL's hash of a number leaves its sign out, that of a time is one of 32 bits.
    """
    return reduce(lambda seed, value: f"hashtextextended(coalesce({value}, {_NULL}), {seed})", texts, "0")


def body_value(item: FieldRule, document: str = "document") -> str:
    *path, last = (sql.text(part) for part in item.body.split("."))
    return f"{' -> '.join([document, *path])} ->> {last}"


def body_kind(item: FieldRule) -> str:
    return f"jsonb_typeof({' -> '.join(['document', *(sql.text(part) for part in item.body.split('.'))])})"


def is_no_text(value: str, kind: str) -> str:
    """Values that PostgreSQL and Spark may write differently as a text: 12.50 or 12.5, {"a": 1} or {"a":1}."""
    whole = f"{value} ~ '^-?[0-9]{{1,15}}$'"
    other = f"{kind} IN ('object', 'array') OR ({kind} = 'number' AND NOT {whole})"
    return f"coalesce({kind} <> 'string' AND ({other}), false)"


def unusual(value: str, item: FieldRule, time: str) -> str:
    """Forms of a value that PostgreSQL reads and Spark may not, or not alike: '0x0C', 'today', 'on', nanoseconds.

    Their buckets are read, so that one reader alone says what a body means. Told by what is left without the digits,
    as a pattern would cost more than the hash.
    """
    rest = f"translate({value}, '0123456789', '')"
    if item.type in (FieldType.INTEGER, FieldType.DECIMAL):
        usual = f"{rest} IN ('', '-', '.', '-.') AND length({value}) <= 26"
    elif item.type is FieldType.BOOLEAN:
        usual = f"{value} IN ('true', 'false', 't', 'f', '1', '0')"
    elif item.type is FieldType.DATE:
        usual = f"{rest} = '--' AND length({value}) = 10"
    elif item.type is FieldType.TIMESTAMP:
        # Asked first, as it costs a seventh of the rest. A year may have five digits; an infinite time has no text.
        plain = f"coalesce(length({value}) = 32 AND {value} = to_char({time}, {_ISO_TIME}), false)"
        usual = (
            f"{plain} OR (translate({rest}, 'T', ' ') IN {_USUAL_TIMES} AND length({value}) BETWEEN 19 AND 32 "
            f"AND substr({value}, 12, 2) < '24' AND substr({value}, 18, 2) < '60' AND {value} !~ '[.][0-9]{{7}}')"
        )
    else:
        return ""
    return f" OR NOT coalesce({usual}, true)"


def normal(value: str, item: FieldRule) -> str:
    """The SQL twin of evidence's normal form."""
    if item.type in (FieldType.INTEGER, FieldType.DECIMAL):
        return f"trim_scale(round({value}::numeric, 12))::text"
    if item.type is FieldType.BOOLEAN:
        return f"({value}::boolean)::text"
    if item.type is FieldType.DATE:
        return f"({value}::date)::text"
    if item.type is FieldType.TIMESTAMP:
        return f"({value}::timestamptz)::text"
    if item.type is FieldType.UUID:
        return f"lower({value}::text)"
    return f"{value}::text"
