"""Parquet with times in nanoseconds, as pandas and Arrow write them: Spark has no such type.

Spark can read them as whole numbers, for all files alike. Which columns those are stands in the files' footers only.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final
from urllib.parse import unquote, urlsplit

import pyarrow as pa
import pyarrow.fs as pafs
import pyarrow.parquet as pq
from pyspark.errors import AnalysisException
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F

from ..errors import UsageProblem

_AS_NUMBERS: Final = "spark.sql.legacy.parquet.nanosAsLong"
_REMEDY: Final = "Export it again with times in microseconds (pandas, Arrow: coerce_timestamps='us')."


def read_parquet(spark: SparkSession, path: str) -> DataFrame:
    """The files of `path`; times in nanoseconds are cut to microseconds.

    Raises UsageProblem, naming the column, for what would be read wrong, and AnalysisException as Spark does.
    """
    if spark.conf.get(_AS_NUMBERS) != "true":
        try:
            return spark.read.parquet(path)
        except AnalysisException as error:
            if "TIMESTAMP(NANOS" not in str(error):
                raise
        # Spark asks for it again when it reads the rows, so it stays: from now on the footers tell times from numbers.
        spark.conf.set(_AS_NUMBERS, "true")
    frame = spark.read.parquet(path)
    return frame.withColumns({name: _cut(name) for name in _columns(path, frame.inputFiles())})


def _cut(name: str) -> Column:
    quoted = f"`{name.replace('`', '``')}`"
    # The remainder is taken off first: integer division goes towards zero, which for times before 1970 is up.
    return F.expr(f"timestamp_micros(({quoted} - pmod({quoted}, 1000L)) div 1000L)")


def _columns(path: str, files: Iterable[str]) -> set[str]:
    """The columns in nanoseconds. All files must agree: Spark reads all by the footer of one."""
    found: set[str] | None = None
    for file in files:
        schema = _footer(file)
        here = {field.name for field in schema if _is_nanoseconds(field.type)}
        for field in schema:
            if field.name not in here and "timestamp[ns" in str(field.type):
                raise UsageProblem(f"{path}: column {field.name!r} holds times in nanoseconds inside. {_REMEDY}")
        if found is not None and found != here:
            names = ", ".join(sorted(found ^ here))
            raise UsageProblem(f"{path}: column {names} is in nanoseconds in some files and not in others. {_REMEDY}")
        found = here
    return found or set()


def _is_nanoseconds(kind: pa.DataType) -> bool:
    return bool(pa.types.is_timestamp(kind)) and kind.unit == "ns"


def _footer(file: str) -> pa.Schema:
    uri = re.sub(r"^s3[an]://", "s3://", file)
    parts = urlsplit(uri)
    if parts.scheme == "file":
        return pq.read_schema(unquote(parts.path))
    filesystem, name = pafs.FileSystem.from_uri(uri)
    return pq.read_schema(name, filesystem=filesystem)
