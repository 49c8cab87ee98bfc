"""The numbers of a body are read exactly."""

from __future__ import annotations

from decimal import Decimal

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from spark.comparison import evidence
from spark.rules.rule import FieldRule, FieldType, Rule
from spark.sources.values import NOT_FINITE, NUMBER

RULE = Rule(
    name="r",
    database="app",
    table="t",
    key="id",
    time="at",
    topic="x",
    fields=(FieldRule(column="total", body="total", type=FieldType.DECIMAL),),
)
EXACT = {
    "12.50": Decimal("12.5"),
    '"12.50"': Decimal("12.5"),
    '" 12.5 "': Decimal("12.5"),
    "1e2": Decimal(100),
    "-0.0": Decimal(0),
    "99999999999999999999999999": Decimal("99999999999999999999999999"),
    # More digits than a double holds.
    "12345678901234567.25": Decimal("12345678901234567.25"),
    "1234567.000000000001": Decimal("1234567.000000000001"),
    "null": None,
    "true": None,
    '"1,5"': None,
    "1e400": None,
}


def bodies(spark: SparkSession, values: list[str]) -> DataFrame:
    return spark.createDataFrame(
        [(number, f'{{"total": {value}}}') for number, value in enumerate(values)], "n int, body string"
    )


def by_from_json(spark: SparkSession, values: list[str], kind: str) -> list[Decimal | None]:
    total = F.from_json("body", f"total {kind}").getItem("total").try_cast(NUMBER).alias("v")
    return [row["v"] for row in bodies(spark, values).orderBy("n").select(total).collect()]


@pytest.mark.timeout(120)
def test_numbers_are_read_exactly(spark_session: SparkSession) -> None:
    # A number of a hundred million digits, were it written out: it must not stop a run.
    unequal = {"1e99999999": None, '"Infinity"': next(iter(NOT_FINITE))}
    values = [*EXACT, *unequal]
    rows = bodies(spark_session, values).orderBy("n").select(*evidence.body_values(RULE)).collect()
    read = dict(zip(values, (None if row["v0"] is None else Decimal(row["v0"]) for row in rows), strict=True))
    assert read == {**EXACT, **unequal}


@pytest.mark.timeout(120)
def test_why_not_from_json(spark_session: SparkSession) -> None:
    """If this fails, Spark reads numbers exactly by now: then from_json, which is faster, can be used."""
    spark, most = spark_session, list(EXACT)
    as_text = dict(zip(most, by_from_json(spark, most, "string"), strict=True))
    as_decimal = dict(zip(most, by_from_json(spark, most, "decimal(38,12)"), strict=True))
    assert as_text["1234567.000000000001"] == Decimal(1234567), "a wrong amount, found equal"
    assert as_decimal['"1,5"'] == Decimal(15), "a false amount, without a sign of it"
