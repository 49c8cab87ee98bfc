"""The contract of the tables, and the packages that spark/ may use."""

from __future__ import annotations

import re
from pathlib import Path

import psycopg
import pytest
from psycopg import sql

import spark
from spark.sources import contract

FOLDER = Path(spark.__file__).parent
SOURCES = sorted(FOLDER.rglob("*.py"))


def test_the_views_have_the_columns_that_the_pipeline_reads(broker_url: str) -> None:
    with psycopg.connect(broker_url) as connection:
        for view, columns in contract.VIEWS.items():
            rows = connection.execute(
                "SELECT attname, format_type(atttypid, NULL) FROM pg_attribute "
                "WHERE attrelid = to_regclass(%s) AND attnum > 0",
                [f"outbox.{view}"],
            ).fetchall()
            installed = {str(name): str(kind) for name, kind in rows}
            assert {name: installed.get(name) for name in columns} == columns, view


def test_the_views_suffice_for_a_role_that_may_read_nothing_else(broker_url: str) -> None:
    role = f"reader_{abs(hash(broker_url)) % 10**9}"
    with psycopg.connect(broker_url, autocommit=True) as connection:
        connection.execute(sql.SQL("CREATE ROLE {}").format(sql.Identifier(role)))
        try:
            connection.execute(sql.SQL("GRANT USAGE ON SCHEMA outbox TO {}").format(sql.Identifier(role)))
            for view in contract.VIEWS:
                statement = sql.SQL("GRANT SELECT ON outbox.{} TO {}")
                connection.execute(statement.format(sql.Identifier(view), sql.Identifier(role)))
            connection.execute(sql.SQL("SET ROLE {}").format(sql.Identifier(role)))
            for view, columns in contract.VIEWS.items():
                names = sql.SQL(", ").join(map(sql.Identifier, columns))
                found = connection.execute(sql.SQL("SELECT {} FROM outbox.{}").format(names, sql.Identifier(view)))
                assert found.fetchall() == []
            with pytest.raises(psycopg.errors.InsufficientPrivilege):
                connection.execute("SELECT * FROM outbox.commit_log")
            connection.execute("RESET ROLE")
        finally:
            connection.execute("RESET ROLE")
            connection.execute(sql.SQL("DROP OWNED BY {}").format(sql.Identifier(role)))
            connection.execute(sql.SQL("DROP ROLE {}").format(sql.Identifier(role)))


# The command silences a logger of the Java that it has started, and at a signal all of them. Spark Connect has none.
SILENCING = [("session.py", "._jvm"), ("session.py", "sparkContext")]


def test_only_public_spark_that_works_with_spark_connect() -> None:
    private = r"\._jvm|\._j\w+|\.rdd\b|sparkContext|SparkContext|\bparallelize\b|(?m:^\s*from spark\b)"
    assert [
        (path.name, found) for path in SOURCES for found in re.findall(private, path.read_text(encoding="utf-8"))
    ] == SILENCING
