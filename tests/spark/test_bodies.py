"""The numbers of a body are read exactly."""

from __future__ import annotations

from dataclasses import replace
from decimal import Decimal

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from spark.judging import evidence
from spark.rules.rule import FieldRule, FieldType, Rule
from spark.sources.values import NOT_FINITE, NUMBER, from_body

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
    rows = (
        evidence.read_again(bodies(spark_session, values), RULE)
        .orderBy("n")
        .select(*evidence.body_values(RULE))
        .collect()
    )
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


DAYS = {
    "2025-06-01": "2025-06-01",
    "2025-06-01T10:00:00Z": "2025-06-01",
    "2025-06-01T10:00:00": "2025-06-01",
    "2025-06-01T23:30:00-02:00": "2025-06-02",
    "2025-06-01 00:30:00.000001+05:45": "2025-05-31",
    "2025-06-01T25:00:00Z": None,
    "2025-06": None,
}


def test_the_date_of_a_time_is_that_of_its_moment_in_utc(spark_session: SparkSession) -> None:
    """2025-06-01T23:30:00-02:00 beside the date column 2025-06-01 were equal, although its day in UTC is another."""
    texts = spark_session.createDataFrame([(text,) for text in DAYS], "text string")
    field = FieldRule(column="day", body="day", type=FieldType.DATE)
    rows = texts.select("text", from_body(F.col("text"), field).cast("string").alias("day")).collect()
    assert {row["text"]: row["day"] for row in rows} == DAYS


RENAMED = replace(
    RULE, fields=(FieldRule(column="total", body="amount", former=("price.total",), type=FieldType.DECIMAL),)
)
OF_RENAMED = {
    '{"amount": 12.50, "price": {"total": 1}}': "12.5",
    '{"price": {"total": "12.50"}}': "12.5",
    '{"amount": null, "price": {"total": 12.5}}': "12.5",
    '{"price": {"total": 12.5}, "x": ' + "[" * 1_200 + "]" * 1_200 + "}": "12.5",
    '{"price": 12.5}': None,
    # Spark reads these numbers as doubles, and JSON's null before them is a value of another type.
    '{"amount": null, "price": {"total": 12345678901234567.25e0}}': "12345678901234567.25",
    '{"amount": null, "price": {"total": 1e400}}': None,
}


def test_the_first_name_of_a_field_with_a_value_counts(spark_session: SparkSession) -> None:
    """On the second look, by both parsers; and on the first."""
    rows = [(body, n, "application/json", "committed") for n, body in enumerate(OF_RENAMED)]
    found = spark_session.createDataFrame(rows, "body string, log_id bigint, content_type string, state string")
    times = {name: F.lit(None).cast("timestamp") for name in ("at", "decided_at", "deliver_at")}
    messages = found.withColumns({**times, "key": F.col("log_id").cast("string"), "body": F.col("body").cast("binary")})
    (value,) = evidence.body_values(RENAMED)
    read = [
        row["v0"] for row in evidence.read_again(messages, RENAMED).select("log_id", value).orderBy("log_id").collect()
    ]
    assert [None if text is None else Decimal(text) for text in read] == [
        None if text is None else Decimal(text) for text in OF_RENAMED.values()
    ]
    row = spark_session.createDataFrame([("k", 0, None, "12.50")], "key string, kind int, at timestamp, f0 string")
    (expected,) = evidence.table_side(row, RENAMED).select("hash").collect()
    first = evidence.broker_side(messages, RENAMED).select("ord", "hash", "bad").collect()
    equal = {each["ord"] for each in first if (each["hash"], each["bad"]) == (expected["hash"], 0)}
    assert equal == {0, 1, 2}, "the fourth is left to the second look"


LONG = 25_000_000
HARD = {
    "1,200 levels": '{"total": 12.50, "x": ' + "[" * 1_200 + "]" * 1_200 + "}",
    "1,500 digits": '{"total": "12.5", "x": ' + "1" * 1_500 + "}",
    "1,500 digits of the value": '{"total": 12.5' + "0" * 1_500 + "}",
    "half a surrogate pair": '{"x": "\\ud800", "total": 12.5}',
    "a name of 60,000 letters": '{"' + "x" * 60_000 + '": 1, "total": 12.5}',
    "25 MB": '{"total": 12.5, "x": "LONG"}',
}


@pytest.mark.timeout(300)
def test_bodies_beyond_the_limits_of_spark_are_compared_on_the_second_look(spark_session: SparkSession) -> None:
    """The first look suspects them. Row and body agree, so the second look finds no fault."""
    rows = [(name, body, "application/json", "committed") for name, body in HARD.items()]
    found = spark_session.createDataFrame(rows, "key string, text string, content_type string, state string")
    body = F.replace("text", F.lit("LONG"), F.repeat(F.lit("y"), F.lit(LONG))).cast("binary")
    times = {name: F.lit(None).cast("timestamp") for name in ("at", "decided_at", "deliver_at")}
    messages = found.withColumns({**times, "body": body, "log_id": F.lit(1).cast("bigint")}).drop("text")
    row = spark_session.createDataFrame([("k", 0, None, "12.50")], "key string, kind int, at timestamp, f0 string")
    (expected,) = evidence.table_side(row, RULE).select("hash").collect()
    first = evidence.broker_side(messages, RULE).select("key", "bad").collect()
    assert {row["key"]: row["bad"] for row in first} == dict.fromkeys(HARD, 1)
    read = evidence.read_again(messages, RULE)
    second = evidence.broker_side(read, RULE, is_exact=True).select("key", "bad", "hash").collect()
    assert {row["key"]: (row["bad"], row["hash"]) for row in second} == dict.fromkeys(HARD, (0, expected["hash"]))
    shown = read.where("key <> '25 MB'").select(*evidence.body_values(RULE), evidence.why_unreadable(RULE))
    assert {(Decimal(row["v0"]), row["why"]) for row in shown.collect()} == {(Decimal("12.5"), "")}
