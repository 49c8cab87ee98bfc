"""Texts as times and numbers, without what Spark's casts make up: today's date for '12:30', a January first for '2024'.

Each is asked cheaply first: nearly all texts have the usual form, and a pattern costs more than the cast.
"""

from __future__ import annotations

from typing import Final

from pyspark.sql import Column
from pyspark.sql import functions as F
from pyspark.sql.types import DecimalType

_DAY: Final = r"^\s*[+-]?[0-9]{4,7}-[0-9]{1,2}-[0-9]{1,2}"
_WITH_TIME: Final = r"([ T][0-9]{1,2}:.*)?\s*$"


def moment(text: Column) -> Column:
    """The time that a text says with its date; null for a time of day, a year or a month alone, and what is no time."""
    return F.when(_has_date(text), text.try_cast("timestamp"))


def checked_moment(text: Column, what: str) -> Column:
    """As `moment`, for a column whose texts have to be times: another text ends the run."""
    failure = F.raise_error(F.concat(F.lit(f"{what} is '"), text, F.lit("', which is no timestamp with a date")))
    return F.when(text.isNull() | _has_date(text), text.cast("timestamp")).otherwise(failure)


def date(text: Column) -> Column:
    """The date that a text says in full, with a time of day or without; null for others."""
    is_usual = (F.length(text) == 10) & _is_dashed(text)
    return F.when(is_usual | text.rlike(_DAY + _WITH_TIME), text.try_cast("date"))


def number(text: Column, kind: DecimalType) -> Column:
    """The number that a text says in ASCII digits; null for others: Java reads those of every script."""
    return F.when(F.octet_length(text) == F.length(text), text.try_cast(kind))


def _has_date(text: Column) -> Column:
    is_usual = _is_dashed(text) & ((F.length(text) == 10) | text.contains(":"))
    return is_usual | text.rlike(_DAY + _WITH_TIME)


def _is_dashed(text: Column) -> Column:
    return (F.substring(text, 5, 1) == "-") & (F.substring(text, 8, 1) == "-")
