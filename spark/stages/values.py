"""A field's value in SQL, written alike by the rows' database and by the one that holds the messages: for checksums."""

from __future__ import annotations

from typing import Final

from ..rules.rule import FieldRule, FieldType
from ..sources import sql

_FIELD_END: Final = "E'\\x1f'"
_NULL: Final = "E'\\x1e'"
# As Python writes it.
_ISO_TIME: Final = "'____-__-__T__:__:__.______+00:00'"
_USUAL_TIMES: Final = "('-- ::', '-- ::.', '-- ::+:', '-- ::.+:', '-- ::-:', '-- ::.-:', '-- ::Z', '-- ::.Z')"


def hashed(texts: list[str]) -> str:
    joined = f" || {_FIELD_END} || ".join(f"coalesce({value}, {_NULL})" for value in texts)
    return f"hashtextextended({joined}, 0)"


def body_value(item: FieldRule, document: str = "document") -> str:
    *path, last = (sql.text(part) for part in item.body.split("."))
    return f"{' -> '.join([document, *path])} ->> {last}"


def body_kind(item: FieldRule) -> str:
    return f"jsonb_typeof({' -> '.join(['document', *(sql.text(part) for part in item.body.split('.'))])})"


def is_no_text(value: str, kind: str) -> str:
    """Values that PostgreSQL and Spark may write differently as a text: 12.50 or 12.5, {"a": 1} or {"a":1}."""
    whole = f"{value} ~ '^-?[0-9]{{1,15}}$'"
    return f"coalesce({kind} IN ('object', 'array') OR ({kind} = 'number' AND NOT {whole}), false)"


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
        # What PostgreSQL writes of it, but for the zeros at its end, has no other digits: asked first, as it costs a
        # third of the rest.
        plain = (
            f"{value} LIKE {_ISO_TIME} AND rtrim(replace(left({value}, 26), 'T', ' '), '0.') "
            f"= rtrim(left({time}::text, -3), '0.')"
        )
        usual = (
            f"({plain}) OR (translate({rest}, 'T', ' ') IN {_USUAL_TIMES} AND length({value}) BETWEEN 19 AND 32 "
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
