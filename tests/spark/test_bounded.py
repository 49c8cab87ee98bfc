"""Long texts in their bounded form: the same from PostgreSQL and from Spark, and what a finding shows of them."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from spark.judging.detail import _shown_difference
from spark.sources import bounded
from tests.spark.conftest import Reconciler
from tests.spark.exports import export
from tests.spark.world import RULES, Order, World

pytestmark = pytest.mark.timeout(900)
LIMIT = bounded.LIMIT
LONG = "x" * LIMIT


def form(text: str) -> str:
    digest = hashlib.sha256(text.encode()).hexdigest()
    return text if len(text) <= LIMIT else f"{text[:LIMIT]}|{len(text)}|{digest}"


def test_postgresql_and_spark_give_the_same_form(spark_session: SparkSession, world: World) -> None:
    texts = ["", "a|1|b", LONG, LONG + "y", LONG[1:] + "\U0001f600", LONG + "\U0001f600e\u0308|\n'", "|" * (2 * LIMIT)]
    world.app.execute("CREATE TEMP TABLE long_text (place int, value text)")
    with world.app.cursor() as cursor:
        cursor.executemany("INSERT INTO long_text VALUES (%s, %s)", list(enumerate(texts)))
    statement = f"SELECT {bounded.in_sql('value')} FROM long_text ORDER BY place"
    wanted = [form(text) for text in texts]
    assert [row[0] for row in world.app.execute(statement.encode())] == wanted
    frame = spark_session.createDataFrame(list(enumerate(texts)), "place int, value string")
    found = frame.sort("place").select(bounded.in_spark(F.col("value"))).collect()
    assert [row[0] for row in found] == wanted
    assert [bounded.parts(each) for each in wanted] == [(text[:LIMIT], len(text)) for text in texts]


@pytest.mark.parametrize(
    ("ours", "theirs", "shown"),
    [
        (
            LONG + "ab",
            None,
            f"'{'x' * 200}'… in the row, null in the body (the row has 100,002 characters, the body 0)",
        ),
        (
            LONG + "ab",
            "xy",
            f"'{'x' * 200}'… in the row, 'xy' in the body "
            "(from character 2 on; the row has 100,002 characters, the body 2)",
        ),
        (
            LONG + "ab",
            LONG,
            f"'{'x' * 100}'… in the row, '{'x' * 100}'… in the body "
            "(their first 100,000 characters are equal; the row has 100,002 characters, the body 100,000)",
        ),
    ],
)
def test_a_difference_of_long_texts_is_shown_by_its_place_or_by_their_lengths(
    ours: str, theirs: str | None, shown: str
) -> None:
    assert _shown_difference(form(ours), None if theirs is None else form(theirs), True) == shown


@pytest.mark.slow
@pytest.mark.parametrize("source", ["postgres", "parquet"])
def test_the_second_look_compares_long_texts_whole(
    reconcile: Reconciler, world: World, tmp_path: Path, source: str
) -> None:
    """A difference after the part that a run carries is a mismatch; equal long texts are none."""
    world.add(*(Order(number=number) for number in (1, 2, 3)))
    for number in (1, 2, 3):
        body = Order(number=number).body.replace(f"customer {number}".encode(), f"{LONG}body".encode())
        world.broker.execute("UPDATE commit_log SET body = %s WHERE key = %s", [body, str(number)])
    world.app.execute("UPDATE orders_order SET customer = %s", [f"{LONG}body"])
    world.app.execute("UPDATE orders_order SET customer = %s WHERE id = 2", [f"{LONG}row"])
    world.app.execute("UPDATE orders_order SET total = total + 1 WHERE id = 3")
    text = RULES.format(extra="", groups="")
    if source == "parquet":
        complete = export(world, source, tmp_path / "export").isoformat()
        for name in ("APP", "BROKER"):
            place = f'kind = "parquet"\npath = "{tmp_path / "export"}"\nwatermark = "{complete}"'
            text = text.replace(f'env = "RECONCILE_{name}"', place)
        text = text.replace('schema = "outbox"\n', "")
    reconcile.rules(text=text)
    rows = {row["key"]: row for row in reconcile.rows(reconcile.run())}
    assert {key: (row["class"], row["mismatched"]) for key, row in rows.items()} == {
        "2": ("MISMATCH", ["customer"]),
        "3": ("MISMATCH", ["total"]),
    }
    assert "the row has 100,003 characters, the body 100,004" in rows["2"]["detail"]
    assert all(len(str(row)) < 10_000 for row in rows.values())
