"""The bounded form of a text: the whole text, or the first LIMIT characters of a longer text, its length and its hash.

The second look carries the compared texts through joins and sorts, and Spark's memory must hold each row. Two texts are
equal if and only if their bounded forms are equal. PostgreSQL and Spark compute the same form.

Six rows with a column of 100 MiB ended a run with `Java heap space` at 3 GB.
"""

from __future__ import annotations

from typing import Final

from pyspark.sql import Column
from pyspark.sql import functions as F

# A bounded form that has more characters than this is the form of a longer text.
LIMIT: Final = 100_000
# The separator may occur in the text itself. `parts` reads the length and the hash from the end of the form.
_SEPARATOR: Final = "|"


def in_sql(text: str) -> str:
    """The SQL expression for the bounded form; `text` is an SQL expression of type text."""
    digest = f"encode(sha256(convert_to({text}, 'UTF8')), 'hex')"
    short = f"concat_ws('{_SEPARATOR}', left({text}, {LIMIT}), length({text}), {digest})"
    return f"CASE WHEN length({text}) > {LIMIT} THEN {short} ELSE {text} END"


def in_spark(text: Column) -> Column:
    """The bounded form of a text column."""
    parts = (F.substring(text, 1, LIMIT), F.length(text).cast("string"), F.sha2(text, 256))
    return F.when(F.length(text) > LIMIT, F.concat_ws(_SEPARATOR, *parts)).otherwise(text)


def parts(form: str) -> tuple[str, int]:
    """The first characters of a text, all of them if it has at most LIMIT, and the length of the text."""
    if len(form) <= LIMIT:
        return form, len(form)
    start, length, _ = form.rsplit(_SEPARATOR, 2)
    return start, int(length)
