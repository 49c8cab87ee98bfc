"""The checksum pre-filter: equal buckets are not read, and nothing is hidden by that."""

from __future__ import annotations

import uuid
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from spark import session
from spark.judging import classify
from spark.rules import file as rules_file
from spark.rules.rule import FieldRule, FieldType
from spark.sources import values
from spark.sources.databases import Sources
from spark.stages import checksums, sides
from tests.spark.conftest import Reconciler
from tests.spark.frames import whole
from tests.spark.test_second_looks import move_boundary
from tests.spark.world import START, Order, World, write_rules

pytestmark = pytest.mark.timeout(300)
HOUR = timedelta(hours=1)


@pytest.fixture
def urls(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """The variables that the rules name."""
    for name, value in world.environment.items():
        monkeypatch.setenv(name, value)


def now() -> datetime:
    return datetime.now(UTC)


@pytest.mark.slow
def test_checksums_skip_equal_buckets_and_read_the_others(reconcile: Reconciler, world: World) -> None:
    reconcile.rules(groups=("logistics", "points"), extra='bucket = "1h"')
    world.add_many(400, every=timedelta(minutes=1))
    rules = rules_file.load(reconcile.folder / "reconcile.toml")
    sources = Sources(reconcile.spark, rules)
    sources.open_all()
    outcome = checksums.compare(whole(rules.rules[0]), rules, sources)
    sources.close_all()
    assert outcome.skipped_rows == 400
    assert outcome.note == "checksum: 7 of 7 buckets are equal, 400 rows were not read"

    world.app.execute("UPDATE orders_order SET total = total + 1 WHERE id = 100")
    world.app.execute("DELETE FROM points_entry WHERE order_id = 300")
    result = reconcile.run(full=True)
    assert set(reconcile.findings(result)) == {("100", "", "MISMATCH"), ("300", "points", "UNDELIVERED")}
    assert result["rules"][0]["rows_read"] == 120
    assert result["rules"][0]["counts"]["OK"] == 399


def test_checksums_say_when_they_do_not_help(reconcile: Reconciler, world: World) -> None:
    world.add_many(5)
    world.broker.execute("UPDATE commit_log SET body = '\\xff' WHERE key = '3'")
    for groups, extra, reason in (
        ((), 'bucket = "1h"', "the database could not compute it"),
        ((), 'bucket = "1h"\nmessages = "at_least_one"', "the rule needs messages = 'exactly_one'"),
        (("logistics",), 'bucket = "1h"\nmessage_when = "key <> \x273\x27"', "a checksum cannot apply message_when"),
    ):
        rules = rules_file.load(reconcile.rules(groups=groups, extra=extra))
        sources = Sources(reconcile.spark, rules)
        sources.open_all()
        outcome = checksums.compare(whole(rules.rules[0]), rules, sources)
        sources.close_all()
        assert reason in outcome.note
        assert (outcome.skipped_rows, outcome.limits) == (0, sides.ReadLimits())


@pytest.mark.soak
def test_a_body_is_read_alike_with_checksums_and_without(reconcile: Reconciler, world: World) -> None:
    """Of a key that comes twice the last counts; what PostgreSQL alone can read as a number or a time is unreadable."""
    world.add_many(9, every=2 * HOUR)
    total, more = """'"total" : "'""", """', "paid_at"'"""
    for number, old, new in (
        (1, total, """'"total" : "77", "total" : "'"""),
        (2, more, """', "total" : "77", "paid_at"'"""),
        (3, """'"3.50"'""", """'"0x03"'"""),
        (4, "'T18:00:00'", "' 6:00:00 PM '"),
        (5, "'T20:00:00+00:00'", "'T20:00:00.0000004+00:00'"),
    ):
        changed = f"convert_to(replace(convert_from(body, 'UTF8'), {old}, {new}), 'UTF8')"
        statement = f"UPDATE commit_log SET body = {changed} WHERE key = '{number}' AND body <> {changed}"
        assert world.broker.execute(statement).rowcount == 1, number
    world.app.execute("UPDATE orders_order SET total = 3 WHERE id = 3")
    expected = {("2", "", "MISMATCH"), ("3", "", "UNREADABLE"), ("4", "", "UNREADABLE")}
    for output, extra in (("out", ""), ("summed", 'bucket = "1h"')):
        reconcile.output = output
        reconcile.rules(groups=(), extra=extra)
        result = reconcile.run()
        assert set(reconcile.findings(result)) == expected, output
    assert "buckets are equal, 5 rows were not read" in result["rules"][0]["notes"][0]


@pytest.mark.parametrize(
    ("text", "usual"),
    [
        ("2025-06-01T10:00:00.000000+00:00", True),
        ("2025-06-01T10:20:30.050000+00:00", True),
        ("2025-06-01 10:20:30.000001+00:00", True),
        ("2025-06-01T10:20:30+02:00", True),
        ("2025-06-01T10:20:30.05Z", True),
        # Of the form of the first, and PostgreSQL reads them.
        ("2025-06-01T24:00:00.000000+00:00", False),
        ("2025-06-01T10:00:60.000000+00:00", False),
        (" 202-06-01T10:00:00.000000+00:00", False),
        ("2025-06-01T10:00:00.5     +00:00", False),
        ("2025-06-01T10:00:00.0000001+00:00", False),
        ("12025-06-01T10:00:00.000000+00:00", False),
        ("infinity", False),
        ("today", False),
    ],
)
def test_times_that_databases_may_read_differently_are_told(world: World, text: str, *, usual: bool) -> None:
    item = FieldRule(column="paid_at", body="paid_at", type=FieldType.TIMESTAMP)
    said = world.broker.execute(
        # The session of a run is in UTC.
        f"SELECT set_config('timezone', 'UTC', true), {values.normal('moment', item)} = "
        f"{values.normal_body('value', item)}, false{values.unusual('value', item)} "
        f"FROM (VALUES ('{text}', '{text}'::timestamptz)) one (value, moment)"
    ).fetchone()
    assert said is not None and (said[1] and not said[2]) is usual


# A row's value with its SQL type, the text in the body, and whether a checksum may take them as equal.
VALUES = [
    (FieldType.DECIMAL, "12.50::numeric(12,2)", "12.50", True),
    (FieldType.DECIMAL, "12.50::numeric(12,2)", "12.5", True),
    (FieldType.DECIMAL, "12::numeric", "12", True),
    (FieldType.DECIMAL, "12::bigint", "12.00", True),
    (FieldType.DECIMAL, "-0.5::float8", "-0.50", True),
    (FieldType.DECIMAL, "1234567::real", "1234567", True),
    (FieldType.DECIMAL, "1234567::real", "1234570", False),
    (FieldType.DECIMAL, "1234567890.1234567::float8", "1234567890.12346", False),
    (FieldType.DECIMAL, "120::numeric", "12", False),
    (FieldType.DECIMAL, "5::numeric", "5..0", False),
    (FieldType.DECIMAL, "5::numeric", "5.0.0", False),
    (FieldType.DECIMAL, "10::numeric", "1e1", False),
    (FieldType.DECIMAL, "10::numeric", "\uff11\uff10", False),
    (FieldType.DECIMAL, "'NaN'::numeric", "NaN", False),
    (FieldType.DECIMAL, "'Infinity'::numeric", "Infinity", False),
    (FieldType.DECIMAL, f"{'9' * 27}::numeric", "9" * 27, False),
    (FieldType.INTEGER, "7::integer", "7", True),
    (FieldType.INTEGER, "7::integer", "007", False),
    (FieldType.BOOLEAN, "true", "true", True),
    (FieldType.BOOLEAN, "false", "0", True),
    (FieldType.BOOLEAN, "true", "on", False),
    (FieldType.DATE, "date '2025-06-01'", "2025-06-01", True),
    (FieldType.DATE, "date '0044-03-15 BC'", "0044-03-15", False),
    (FieldType.DATE, "date '0044-03-15 BC'", "0044-03-15 BC", False),
    (FieldType.DATE, "date 'infinity'", "infinity", False),
    (FieldType.TIMESTAMP, "timestamptz '0044-03-15 12:00:00.5Z BC'", "0044-03-15T12:00:00.500000+00:00", False),
    (FieldType.TIMESTAMP, "timestamptz '12025-06-01 12:00:00.5Z'", "2025-06-01T12:00:00.500000+00:00", False),
    (FieldType.TIMESTAMP, "timestamptz '2025-06-01 12:00:00.5Z'", "2025-06-01T12:00:00.500000+00:00", True),
    (FieldType.TIMESTAMP, "timestamptz '2025-06-01 12:00:00.5Z'", "2025-06-01T14:00:00.5+02:00", True),
    (FieldType.TIMESTAMP, "date '2025-06-01'", "2025-06-01T00:00:00+00:00", True),
]


def test_a_value_has_the_form_of_its_text_only_if_spark_reads_this_value(world: World) -> None:
    world.broker.execute("SET timezone = 'UTC'")
    wrong = []
    for kind, row, body, is_equal in VALUES:
        item = FieldRule(column="value", body="value", type=kind)
        said = world.broker.execute(
            f"SELECT ({values.normal('ours', item)} = {values.normal_body('theirs', item)}) "
            f"AND NOT (false{values.unusual('theirs', item)}) FROM (SELECT {row} AS ours, %s::text AS theirs) one",
            [body],
        ).fetchone()
        if said != (is_equal,):
            wrong.append((row, body, said))
    assert wrong == []


def test_no_field_can_imitate_the_end_of_another(world: World) -> None:
    ours, theirs = values.hashed(["E'a\\x1fb'", "'c'"]), values.hashed(["'a'", "E'b\\x1fc'"])
    said = world.broker.execute(f"SELECT {ours} = {theirs}, {ours} = {ours}").fetchone()
    assert said == (False, True)


def test_a_clean_day_by_checksums_takes_no_job_of_spark(reconcile: Reconciler, world: World) -> None:
    """Nor are its rows counted again for the report: the buckets are fine enough."""
    reconcile.rules(extra='bucket = "10m"')
    world.add_many(100, every=timedelta(minutes=10))
    context = reconcile.spark.sparkContext
    context.setJobGroup("a clean day", "")
    result = reconcile.run(full=True)
    assert result["rules"][0]["rows_equal_by_checksum"] == 100
    assert list(context.statusTracker().getJobIdsForGroup("a clean day")) == []
    assert reconcile.findings(result) == []


@pytest.mark.soak
def test_checksums_hide_nothing(reconcile: Reconciler, world: World) -> None:
    """Keys that both sides have twice, other content types, bodies of another time, numbers as texts."""
    reconcile.rules(groups=(), extra='bucket = "1h"')
    world.add_many(20)
    world.broker.execute("UPDATE commit_log SET content_type = 'application/octet-stream' WHERE key = '5'")
    world.send(Order(number=900, at=START - HOUR), stored_at=START + HOUR)
    # As a text, PostgreSQL writes 12.50 and Spark 12.5: findings must not depend on the one that compares.
    world.app.execute("UPDATE orders_order SET customer = '12.50' WHERE id = 7")
    number = """convert_to(replace(convert_from(body, 'UTF8'), '"customer 0"', '12.50'), 'UTF8')"""
    world.broker.execute(f"UPDATE commit_log SET body = {number} WHERE key = '7'")
    expected = {("5", "", "UNREADABLE"), ("7", "", "MISMATCH"), ("900", "", "ORPHAN")}
    first = reconcile.run(since=START, until=START + 2 * HOUR)
    assert set(reconcile.findings(first)) == expected
    world.app.execute("ALTER TABLE orders_order DROP CONSTRAINT orders_order_pkey")
    for total in (Decimal("12.50"), Decimal(7)):
        world.pay(Order(number=700, total=total))
        world.send(Order(number=700, total=total), message_id=uuid.uuid4())
    second = reconcile.run(since=START, until=START + 2 * HOUR)
    assert set(reconcile.findings(second)) == {*expected, ("700", "", "DUPLICATE")}
    assert "two rows have the same key" in second["rules"][0]["notes"][0]
    world.broker.execute("UPDATE commit_log SET body = '\\xff' WHERE key = '3'")
    world.app.execute("DELETE FROM orders_order WHERE id = 700")
    third = reconcile.run(since=START, until=START + 2 * HOUR)
    assert set(reconcile.findings(third)) == {*expected, ("700", "", "ORPHAN"), ("3", "", "UNREADABLE")}
    assert "the database could not compute it" in third["rules"][0]["notes"][0]


def test_a_second_effect_of_an_old_row_makes_its_bucket_differ(world: World, tmp_path: Path, urls: None) -> None:
    """Its row is in no bucket of the window, so no count of the window shows it."""
    rules = rules_file.load(write_rules(tmp_path, groups=("logistics",), extra='bucket = "1h"'))
    world.add_many(5)
    world.add(Order(number=9, at=START + 26 * HOUR))
    window = classify.Window(START + 24 * HOUR, START + 48 * HOUR, START + 48 * HOUR)
    prepared = replace(whole(rules.rules[0]), window=window)
    note = "checksum: 1 of 1 buckets are equal, 1 rows were not read"
    for is_planted in (False, True):
        if is_planted:
            world.effect("logistics", 3, START + 26 * HOUR)
        sources = Sources(unused_session(), rules)
        sources.open_all()
        outcome = checksums.compare(prepared, rules, sources)
        sources.close_all()
        assert (outcome.note, outcome.limits.is_nothing) == (note, not is_planted)


def test_messages_of_before_the_window_are_not_parsed(world: World, tmp_path: Path, urls: None) -> None:
    """The checksums of an incremental run cost as much as its window, not as much as the log. The old message has a
    body that no database parses."""
    rules = rules_file.load(write_rules(tmp_path, groups=(), extra='bucket = "1h"'))
    world.add_many(5)
    world.broker.execute("UPDATE commit_log SET body = '\\xff' WHERE key = '3'")
    world.add(Order(number=9, at=START + 26 * HOUR))
    window = classify.Window(START + 24 * HOUR, START + 48 * HOUR, START + 48 * HOUR)
    for since, note in (
        (window.since, "checksum: 1 of 1 buckets are equal, 1 rows were not read"),
        (None, "checksum: not used, because the database could not compute it"),
    ):
        prepared = replace(whole(rules.rules[0]), window=replace(window, since=since))
        sources = Sources(unused_session(), rules)
        sources.open_all()
        outcome = checksums.compare(prepared, rules, sources)
        sources.close_all()
        assert outcome.note.startswith(note)


def unused_session() -> SparkSession:
    """A session that fails when it is used."""

    def fail() -> SparkSession:
        raise AssertionError("checksums need no Spark")

    return session.deferred(fail)


@pytest.mark.soak
def test_a_second_effect_of_an_old_row_is_found(reconcile: Reconciler, world: World) -> None:
    """No look back reads its row again."""
    reconcile.rules(groups=("logistics",), extra='look_back = "0s"\nbucket = "1h"')
    world.add_many(5)
    assert reconcile.findings(reconcile.run()) == []
    move_boundary(reconcile, START + 24 * HOUR)
    world.add(Order(number=9, at=START + 26 * HOUR))
    world.effect("logistics", 3, START + 26 * HOUR)
    assert reconcile.findings(reconcile.run()) == [("3", "logistics", "DUPLICATE")]
