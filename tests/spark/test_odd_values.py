"""Rows and bodies with values that are rare but allowed, in one run: each has its own finding, or none."""

from __future__ import annotations

import json
import re
from datetime import timedelta
from typing import Any

import pytest
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from spark.common.store import Store
from spark.judging import detail, evidence
from spark.output import plan, report
from spark.rules import file as rules_file
from spark.rules.rule import FieldRule, FieldType, Rule
from spark.sources.values import NOT_FINITE, NUMBER, in_calendar
from tests.spark.conftest import Reconciler
from tests.spark.world import RULES, START, Order, World

pytestmark = pytest.mark.timeout(300)

# A date with a time that no offset follows.
WITHOUT_OFFSET = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}[T ][0-9]{2}:[0-9]{2}(:[0-9.]+)?(?![0-9:.]*(Z|[+-][0-9]{2}:))")
# Their values differ from those of order 5: else one of them would be taken for its row, under a changed key.
LOST = [number for number in range(20, 44) if number % 7 != 5][:20]


@pytest.mark.parametrize("ansi", ["true", "false"])
def test_numbers_are_shown_plainly(spark_session: SparkSession, ansi: str) -> None:
    """In a session without ANSI, a cast writes some as 0E-12 and 1.00E-10."""
    field = FieldRule(column="total", body="total", type=FieldType.DECIMAL)
    texts = ["0", "0.0000000001", "0.000000000001", "12.5", "100", "-0.05", f"{'8' * 26}.{'1' * 12}", "nan"]
    values = F.coalesce(F.col("value").try_cast(NUMBER), F.lit(next(reversed(NOT_FINITE))).cast(NUMBER)).cast("string")
    frame = spark_session.createDataFrame([(text,) for text in texts], "value string")
    before = str(spark_session.conf.get("spark.sql.ansi.enabled"))
    spark_session.conf.set("spark.sql.ansi.enabled", ansi)
    try:
        shown = [row[0] for row in frame.select(detail._readable(values, field)).collect()]
    finally:
        spark_session.conf.set("spark.sql.ansi.enabled", before)
    assert shown == texts


@pytest.mark.slow
def test_values_that_are_rare_are_compared_or_named(reconcile: Reconciler, world: World) -> None:
    world.app.execute("ALTER TABLE orders_order ALTER total TYPE numeric")
    numbers = {
        1: ("NaN", "NaN"),
        2: ("NaN", "12.50"),
        3: ("1e300", "1e300"),
        4: ("Infinity", "inf"),
        6: ("-inf", "NaN"),
        7: ("0.000000000000001", "2e-15"),
    }
    world.add(
        *(Order(number=number) for number in (*numbers, 5, *LOST)), Order(number=90, at=START + timedelta(hours=1))
    )
    for number, (ours, theirs) in numbers.items():
        world.app.execute("UPDATE orders_order SET total = %s WHERE id = %s", [ours, number])
        body = Order(number=number).body.replace(b'"12.50"', json.dumps(theirs).encode())
        world.broker.execute("UPDATE commit_log SET body = %s WHERE key = %s", [body, str(number)])
    world.app.execute("UPDATE orders_order SET paid_at = NULL WHERE id = 5")
    world.broker.execute("DELETE FROM commit_log WHERE key::int = ANY(%s)", [LOST])
    path = reconcile.rules(
        text=RULES.format(extra="", groups="").replace('when = "paid_at IS NOT NULL"', "when = \"status = 'paid'\"")
    )
    result = reconcile.run()
    rows = {row["key"]: row for row in reconcile.rows(result)}
    assert {key: row["class"] for key, row in rows.items()} == {
        "2": "MISMATCH", "3": "UNREADABLE", "5": "ORPHAN", "6": "MISMATCH", **dict.fromkeys(map(str, LOST), "LOST"),
    }  # fmt: skip
    assert rows["2"]["detail"] == "row and body differ: total nan in the row, 12.5 in the body"
    assert rows["6"]["detail"] == "row and body differ: total -infinity in the row, nan in the body"
    assert rows["3"]["detail"].endswith(", which is no decimal of up to 26 digits before the point")
    assert rows["5"]["detail"] == "the row has no time (paid_at is null), but a message was sent"
    assert json.loads(rows["5"]["row"])["paid_at"] is None
    of_lost = [cause for cause in result["causes"] if cause["class"] == "LOST"]
    assert [(cause["findings"], cause["new"]) for cause in of_lost] == [(20, 20)]
    lines = re.findall(r"<tr>(.*?)</tr>", report._causes(result))
    assert len(lines) == 1 + len(result["causes"]) == 5
    output = str(reconcile.folder / reconcile.output)
    printed = [*Store(output).finding_lines(), *plan.lines(output, rules_file.load(path)), json.dumps(result)]
    assert [text for line in printed for text in _texts(json.loads(line)) if WITHOUT_OFFSET.search(text)] == []


def test_a_number_that_is_not_finite_is_equal_to_itself_alone(spark_session: SparkSession) -> None:
    """And 1e300, which a decimal does not hold, is named with the reason."""
    rule = Rule(
        name="r", database="d", table="t", key="id", time="at", topic="x",
        fields=(FieldRule(column="v", body="v", type=FieldType.DECIMAL),),
    )  # fmt: skip
    rows = [("NaN", "nan"), ("Infinity", "inf"), ("-Infinity", "-inf"), ("1e300", "1e300"), ("12.50", "12.5")]
    frame = spark_session.createDataFrame(
        [(*row, json.dumps({"v": row[1]}), "application/json", "committed") for row in rows],
        "f0 string, theirs string, body string, content_type string, state string",
    )
    ours, theirs = evidence.row_values(rule)[0].alias("ours"), evidence.body_values(rule)[0].alias("body")
    found = evidence.read_again(frame, rule).select(ours, theirs, evidence.why_row_unreadable(rule)).collect()
    assert [row["ours"] for row in found] == [row["body"] for row in found]
    assert len({row["ours"] for row in found}) == len(rows)
    assert [row["why"] for row in found] == [
        "", "", "", "v is '1e300', which is no decimal of up to 26 digits before the point", "",
    ]  # fmt: skip


def test_times_that_differ_by_more_than_their_tolerance_are_shown(spark_session: SparkSession) -> None:
    """They are compared in seconds; the finding named no time, but `null` twice."""
    field = FieldRule(column="at", body="at", type=FieldType.TIMESTAMP, tolerance="5")
    rule = Rule(name="r", database="d", table="t", key="id", time="at", topic="x", fields=(field,))
    times = spark_session.createDataFrame(
        [("1748779200.000000000000", "1748779205.500000000000")], "ours string, theirs string"
    )
    sides = [F.struct(F.col(name).alias("v0")).alias(side) for name, side in (("ours", "row"), ("theirs", "about"))]
    [(text,)] = times.select(*sides).select(detail._differences(rule)).collect()
    assert text == "at 2025-06-01T12:00:00.000000Z in the row, 2025-06-01T12:00:05.500000Z in the body"


def test_a_time_that_python_has_not_becomes_the_nearest_one(spark_session: SparkSession) -> None:
    days = [("-0043-03-15",), ("0001-01-01",), ("2025-06-01",), (None,), ("+20000-01-01",)]
    frame = spark_session.createDataFrame(days, "day string").select(F.col("day").cast("timestamp").alias("at"))
    shown = in_calendar(frame).select(F.col("at").cast("date").cast("string")).collect()
    assert [row[0] for row in shown] == ["0001-01-02", "0001-01-02", "2025-06-01", None, "9999-12-30"]


@pytest.mark.slow
def test_an_effect_after_the_year_9999_is_one_finding(reconcile: Reconciler, world: World) -> None:
    world.add(Order(number=1), Order(number=2))
    world.app.execute("UPDATE logistics_shipment SET created_at = '20000-01-01 00:00Z' WHERE order_id = 1")
    reconcile.rules(groups=("logistics",))
    assert reconcile.findings(reconcile.run()) == [("1", "logistics", "LATE")]
    [line] = Store(str(reconcile.folder / reconcile.output)).finding_lines()
    assert json.loads(line)["effect_at"] == "9999-12-30T00:00:00+00:00"


def _texts(value: Any) -> list[str]:
    """All texts in a JSON value, and in the JSON that they contain."""
    if isinstance(value, str):
        inner = json.loads(value) if value.startswith("{") else None
        return _texts(inner) if inner else [value]
    values = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [text for each in values for text in _texts(each)]
