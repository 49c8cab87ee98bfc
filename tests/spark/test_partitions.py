"""A large or partitioned table is read by several tasks, the same rows as in one piece."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import timedelta

import psycopg
import pytest
from psycopg.conninfo import make_conninfo
from pyspark.sql import SparkSession

from spark.rules import file as rules_file
from spark.sources import contract, postgres
from spark.sources.postgres import PostgresSource
from tests.spark.world import RULES, START

pytestmark = pytest.mark.timeout(300)
ORDERS = """
CREATE TABLE orders_order (id bigint, customer text, total numeric(12,2), status text, created_at timestamptz,
    paid_at timestamptz) PARTITION BY RANGE (paid_at);
CREATE TABLE "a.day" PARTITION OF orders_order FOR VALUES FROM ('2025-06-01Z') TO ('2025-06-02Z');
CREATE TABLE later PARTITION OF orders_order FOR VALUES FROM ('2025-06-02Z') TO ('2026-01-01Z') PARTITION BY HASH (id);
CREATE TABLE later_even PARTITION OF later FOR VALUES WITH (MODULUS 2, REMAINDER 0);
CREATE TABLE later_odd PARTITION OF later FOR VALUES WITH (MODULUS 2, REMAINDER 1);
CREATE TABLE others PARTITION OF orders_order DEFAULT;
INSERT INTO orders_order SELECT n, 'c', 1, 'paid', t, t
FROM (SELECT n, timestamptz '2025-05-31Z' + n * interval '1 hour' AS t FROM generate_series(1, 72) n) made;
"""
Made = tuple[str, Callable[[str], PostgresSource]]


@pytest.fixture
def partitioned(new_database: Callable[..., str], spark_session: SparkSession) -> Iterator[Made]:
    """The database, and an opened source for a connection string to it."""
    url, opened = new_database(), []
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(ORDERS)

    def source(location: str) -> PostgresSource:
        rules = rules_file.parse(
            RULES.format(extra="", groups=""), environment={"RECONCILE_APP": location, "RECONCILE_BROKER": location}
        )
        made = PostgresSource(spark_session, rules.databases["app"])
        made.open([])
        opened.append(made)
        return made

    yield url, source
    for each in opened:
        each.close()


RULE = rules_file.parse(
    RULES.format(extra="", groups=""), environment={"RECONCILE_APP": "", "RECONCILE_BROKER": ""}
).rules[0]


def test_tasks_divide_the_pages_of_each_partition(partitioned: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also for a role that may not read the partitions by name."""
    monkeypatch.setattr(postgres, "PAGES_PER_TASK", 1)
    url, source = partitioned
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(
            "INSERT INTO orders_order SELECT n, repeat('x', 200), 1, 'paid', t, t FROM (SELECT n, "
            "timestamptz '2025-06-02 12:00Z' + n * interval '1 minute' AS t FROM generate_series(73, 500) n) made; "
            "DROP ROLE IF EXISTS partition_reader; CREATE ROLE partition_reader LOGIN; "
            "GRANT pg_read_all_stats TO partition_reader; GRANT SELECT ON orders_order TO partition_reader"
        )
    try:
        opened = source(make_conninfo(url, user="partition_reader"))
        whole = opened.read([contract.rows(RULE)], None)
        assert whole.rdd.getNumPartitions() > 4
        assert sorted(int(row["key"]) for row in whole.collect()) == list(range(1, 501))
        rows = opened.read([contract.rows(RULE)], START + timedelta(days=1))
        assert sorted(int(row["key"]) for row in rows.collect()) == list(range(60, 501))
    finally:
        with psycopg.connect(url, autocommit=True) as connection:
            connection.execute("DROP OWNED BY partition_reader; DROP ROLE partition_reader")


def test_a_large_table_is_read_from_a_time_on(partitioned: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    """By its index where it has one, else by ranges of pages."""
    monkeypatch.setattr(postgres, "PAGES_PER_TASK", 1)
    url, source = partitioned
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(
            "DROP TABLE orders_order; CREATE TABLE orders_order (id bigint, customer text, total numeric, "
            "paid_at timestamptz)"
        )
        connection.execute(
            "INSERT INTO orders_order SELECT n, repeat('x', 100), 1, timestamptz '2025-06-01 12:00Z' + "
            "n * interval '1 min' FROM generate_series(1, 300) n"
        )
        for has_index in (False, True):
            rows = source(url).read([contract.rows(RULE)], START + timedelta(minutes=290))
            assert (rows.rdd.getNumPartitions() == 1) is has_index
            assert rows.count() == 11
            connection.execute("CREATE INDEX ON orders_order (paid_at)")
            connection.execute("ANALYZE orders_order")
        whole = source(url).read([contract.rows(RULE)], START)
        assert whole.rdd.getNumPartitions() > 1, "retention has removed nothing newer: the index finds nearly all rows"
