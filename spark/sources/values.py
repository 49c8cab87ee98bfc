"""The comparable form of a value: computed from a text in Spark, and computed in SQL for checksums.

Spark's casts invent missing parts of a time: today's date for '12:30', January 1 for '2024'. The functions of this
module refuse such texts. Each function first makes a cheap check for the usual form, which nearly all texts have. A
regular expression would take longer than the cast.
"""

from __future__ import annotations

from decimal import Decimal
from functools import reduce
from typing import Final

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F
from pyspark.sql.types import DecimalType, TimestampType

from ..rules.rule import FieldRule, FieldType
from . import sql

NUMBER: Final = DecimalType(38, 12)
# PostgreSQL's numeric and float columns have three values that a decimal lacks. Each is compared as a number at the end
# of the range, where no amount is. The first name is the one that a finding shows.
NOT_FINITE: Final = {
    Decimal(f"{'9' * 26}.{'9' * 12}"): ("infinity", "inf"),
    Decimal(f"-{'9' * 26}.{'9' * 12}"): ("-infinity", "-inf"),
    Decimal(f"-{'8' * 26}.{'8' * 12}"): ("nan",),
}
_DAY: Final = r"^\s*[+-]?[0-9]{4,7}-[0-9]{1,2}-[0-9]{1,2}"
_WITH_TIME: Final = r"([ T][0-9]{1,2}:.*)?\s*$"
_NULL: Final = "E'\\x1e'"
# The format of a time in Python's isoformat, for a database session whose time zone is UTC.
_ISO_TIME: Final = """'YYYY-MM-DD"T"HH24:MI:SS.US"+00:00"'"""
_USUAL_TIMES: Final = "('-- ::', '-- ::.', '-- ::+:', '-- ::.+:', '-- ::-:', '-- ::.-:', '-- ::Z', '-- ::.Z')"


def from_column(value: Column, field: FieldRule) -> Column:
    """The comparable form of a row's column; null if the value does not have the field's type."""
    if field.type is FieldType.TIMESTAMP:
        return _time(value.try_cast("bigint"), field)
    return _compared(value, field)


def from_body(value: Column, field: FieldRule) -> Column:
    """The comparable form of a body's field, given as a text; null if the value does not have the field's type."""
    if field.type is FieldType.TIMESTAMP:
        return _time(F.unix_micros(moment(value)), field)
    return _compared(value, field)


def _time(microseconds: Column, field: FieldRule) -> Column:
    if field.tolerance is None:
        return microseconds
    return (microseconds.cast(DecimalType(20, 0)) / F.lit(1_000_000).cast(DecimalType(7, 0))).cast(NUMBER)


def _compared(value: Column, field: FieldRule) -> Column:
    if field.type is FieldType.INTEGER:
        return number(value)
    if field.type is FieldType.DECIMAL:
        special = [
            F.when(F.lower(value).isin(*names), F.lit(place).cast(NUMBER)) for place, names in NOT_FINITE.items()
        ]
        return F.coalesce(number(value), *special)
    if field.type is FieldType.BOOLEAN:
        return value.try_cast("boolean")
    if field.type is FieldType.DATE:
        return date(value)
    if field.type is FieldType.UUID:
        return F.lower(value)
    return value


def json_paths(field: FieldRule, root: str) -> list[str]:
    """The JSON paths of the field in a body: the first one that a body has counts. `root` is the path of the body."""
    return [root + "".join(f'["{part}"]' for part in path.split(".")) for path in field.paths]


def moment(text: Column) -> Column:
    """The time in a text with a full date; null for other texts, such as a time of day, a year or a month alone."""
    return F.when(_has_date(text), text.try_cast("timestamp"))


def in_calendar(frame: DataFrame) -> DataFrame:
    """The frame, with each time before or after the years 1 to 9999 moved to their first or last day: Python and other
    readers of a result have no such times. Each end is a day away, so that a time zone moves no time beyond it."""
    first, last = (F.lit(day).cast("timestamp") for day in ("0001-01-02", "9999-12-30"))
    names = [field.name for field in frame.schema if isinstance(field.dataType, TimestampType)]
    bounded = {name: F.when(F.col(name) < first, first).when(F.col(name) > last, last) for name in names}
    return frame.withColumns({name: time.otherwise(F.col(name)) for name, time in bounded.items()})


def checked_moment(text: Column, what: str) -> Column:
    """The time in a text of a column whose texts must be times. If a text is not a time, the run ends with an error."""
    failure = F.raise_error(F.concat(F.lit(f"{what} is '"), text, F.lit("', which is no timestamp with a date")))
    return F.when(text.isNotNull(), F.coalesce(moment(text), failure))


def date(text: Column) -> Column:
    """The date in a text with a full date; of a text with a time of day, the date in UTC. Null for other texts."""
    is_usual = (F.length(text) == 10) & _is_dashed(text)
    # The cast of such a text to a date would leave out its time and its offset.
    of_time = F.when(text.rlike(_DAY + _WITH_TIME), text.try_cast("timestamp").cast("date"))
    return F.when(is_usual, text.try_cast("date")).otherwise(of_time)


def number(text: Column) -> Column:
    """The number in a text of ASCII characters; null for other texts. Without the limit to ASCII, Java would also read
    the digits of other scripts."""
    return F.when(F.octet_length(text) == F.length(text), text.try_cast(NUMBER))


def _has_date(text: Column) -> Column:
    is_usual = _is_dashed(text) & ((F.length(text) == 10) | text.contains(":"))
    return is_usual | text.rlike(_DAY + _WITH_TIME)


def _is_dashed(text: Column) -> Column:
    return (F.substring(text, 5, 1) == "-") & (F.substring(text, 8, 1) == "-")


# The functions below give the SQL for the comparable forms, which the database of the rows and the database of the
# messages compute.


def hashed(texts: list[str]) -> str:
    """A 64-bit hash of all texts. The hash of each text is the seed for the hash of the next text, so the database
    copies no text.

    The arguments must be texts, because PostgreSQL's hash of a number ignores the sign, and its hash of a time has only
    32 bits.
    """
    return reduce(lambda seed, value: f"hashtextextended(coalesce({value}, {_NULL}), {seed})", texts, "0")


def body_value(item: FieldRule, document: str = "document") -> str:
    *path, last = (sql.text(part) for part in item.body.split("."))
    return f"{' -> '.join([document, *path])} ->> {last}"


def body_kind(item: FieldRule) -> str:
    return f"jsonb_typeof({' -> '.join(['document', *(sql.text(part) for part in item.body.split('.'))])})"


def is_no_text(value: str, kind: str) -> str:
    """A condition for values that PostgreSQL and Spark may write as different texts, such as {"a": true} and
    {"a":true}, or 12.50 and 12.5."""
    whole = f"{value} ~ '^-?[0-9]{{1,15}}$'"
    other = f"{kind} IN ('object', 'array') OR ({kind} = 'number' AND NOT {whole})"
    return f"coalesce({kind} <> 'string' AND ({other}), false)"


def unusual(value: str, item: FieldRule) -> str:
    """A condition, joined by OR, for values of a body that may be equal to the row's value by `normal_body`, but that
    Spark may refuse or read as another value."""
    if item.type in (FieldType.INTEGER, FieldType.DECIMAL):
        return f" OR coalesce(length({value}) > 26, false)"
    if item.type is FieldType.DATE:
        return f" OR coalesce(length({value}) <> 10, false)"
    if item.type is FieldType.TIMESTAMP:
        rest = f"translate(translate({value}, '0123456789', ''), 'T', ' ')"
        usual = (
            f"{rest} IN {_USUAL_TIMES} AND length({value}) BETWEEN 19 AND 32 "
            f"AND substr({value}, 12, 2) < '24' AND substr({value}, 18, 2) < '60' AND {value} !~ '[.][0-9]{{7}}'"
        )
        return f" OR NOT coalesce(({_is_plain(value)}) OR ({usual}), true)"
    return ""


def _is_plain(value: str) -> str:
    """A condition for texts that may be a time as _ISO_TIME writes it."""
    return f"{value} LIKE '__________T_______________+00:00'"


def normal(value: str, item: FieldRule) -> str:
    """An SQL expression for the comparable form of a row's value. Two values have the same form if Spark finds them
    equal in the module `evidence`."""
    if item.type in (FieldType.INTEGER, FieldType.DECIMAL):
        # A number always has a point: 12.5 and 12. are the forms of 12.50 and 12. As numeric, a real has only 6 digits,
        # and a double 15. As text, both have all their digits.
        return f"rtrim(round({value}::text::numeric, 12)::text, '0')"
    if item.type is FieldType.BOOLEAN:
        return f"({value}::boolean)::text"
    if item.type is FieldType.DATE:
        return f"({value}::date)::text"
    if item.type is FieldType.TIMESTAMP:
        moment = f"({value}::timestamptz)"
        # The format has no sign for a year before Christ, and no digit for a year after 9999.
        return (
            f"CASE WHEN {moment} >= '0001-01-01' AND {moment} < '10000-01-01' THEN to_char({moment}, {_ISO_TIME}) "
            f"ELSE {moment}::text END"
        )
    if item.type is FieldType.UUID:
        return f"lower({value}::text)"
    return f"{value}::text"


def normal_body(value: str, item: FieldRule) -> str:
    """An SQL expression for the comparable form of a body's value, which is a text.

    A value in the usual form is not converted: if its text is equal to the form of the row's value, it has this value.
    To convert it and to check its form, the database would need more CPU than to parse the whole body.
    """
    if item.type in (FieldType.INTEGER, FieldType.DECIMAL):
        return f"CASE WHEN strpos({value}, '.') > 0 THEN rtrim({value}, '0') ELSE {value} || '.' END"
    if item.type is FieldType.BOOLEAN:
        return f"CASE WHEN {value} IN ('t', '1') THEN 'true' WHEN {value} IN ('f', '0') THEN 'false' ELSE {value} END"
    if item.type is FieldType.DATE:
        return value
    if item.type is FieldType.TIMESTAMP:
        return f"CASE WHEN {_is_plain(value)} THEN {value} ELSE {normal(value, item)} END"
    return normal(value, item)
