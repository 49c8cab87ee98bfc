"""`outbox_spark.run`, the function for notebooks and schedulers: typed results, and the session as it was."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pyspark.sql import SparkSession

import spark
from spark.output.result import _is_tolerated
from spark.rules.rule import CLASSES, Rule, Tolerance
from tests.spark.conftest import Reconciler
from tests.spark.test_own_session import OWN
from tests.spark.world import Order, World


def state_of(session: SparkSession) -> tuple[Any, ...]:
    """What a run may leave in a session: settings, cached tables, views."""
    cached = session.sparkContext._jsc.getPersistentRDDs().size()
    return (session.conf.getAll, cached, [table.name for table in session.catalog.listTables()])


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_run_returns_frames_and_leaves_the_session_as_it_was(reconcile: Reconciler, world: World) -> None:
    world.add(Order(number=1), Order(number=2))
    world.app.execute("UPDATE orders_order SET total = 1 WHERE id = 2")
    rules, output, conf = reconcile.rules(extra="fail_above = 1"), str(reconcile.folder / "out"), reconcile.spark.conf
    before = {name: conf.get(name, None) for name in OWN}
    try:
        for name, value in OWN.items():
            conf.set(name, value)
        state = state_of(reconcile.spark)
        result = spark.run(reconcile.spark, rules, output=output, quiet=True)
        assert state_of(reconcile.spark) == state
    finally:
        for name, own in before.items():
            conf.unset(name) if own is None else conf.set(name, own)
    assert (result.exit_code, result.faults) == (0, 1), "the rule tolerates one"
    assert [(row["key"], row["class"], row["mismatched"]) for row in result.findings.collect()] == [
        ("2", "MISMATCH", ["total"])
    ]
    assert [(row["class"], row["detail"], row["findings"]) for row in result.causes.collect()] == [
        ("MISMATCH", "total", 1)
    ]
    counted = {row["class"]: row["subjects"] for row in result.counts.where("subjects > 0").collect()}
    assert counted == {"MISMATCH": 1, "OK": 1}
    assert result.contents["status"] == "findings"
    assert "MISMATCH" in Path(result.report).read_text()


def test_options_that_exclude_each_other_are_refused_before_any_work() -> None:
    nothing: Any = None
    now = datetime.now(UTC)
    with pytest.raises(spark.ReconcileError, match="belong together") as caught:
        spark.run(nothing, "reconcile.toml", since=now)
    assert caught.value.exit_code == 2
    with pytest.raises(spark.ReconcileError, match="is not before"):
        spark.run(nothing, "reconcile.toml", since=now, until=now - timedelta(days=1))
    with pytest.raises(spark.ReconcileError, match="is not a duration"):
        spark.run(nothing, "reconcile.toml", look_back="soon")
    with pytest.raises(spark.ReconcileError, match="cannot be combined"):
        spark.run(nothing, "reconcile.toml", look_back="7d", full=True)


@pytest.mark.parametrize(
    ("own", "faults", "of_file", "is_tolerated"),
    [
        ((None, None), (1, 1), Tolerance(2), True),
        ((None, None), (1, 2), Tolerance(2), False),
        ((Tolerance(5), None), (5, 0), Tolerance(), True),
        ((Tolerance(5), None), (6, 0), Tolerance(9), False),
        ((Tolerance(5), None), (5, 1), Tolerance(), False),
        ((Tolerance(0.1, is_share=True), None), (10, 0), Tolerance(), True),
        ((Tolerance(0.1, is_share=True), None), (11, 0), Tolerance(), False),
        ((Tolerance(5), None), (7, 0), Tolerance(), True),
    ],
)
def test_a_rule_has_a_threshold_of_its_own(
    own: tuple[Tolerance | None, Tolerance | None], faults: tuple[int, int], of_file: Tolerance, is_tolerated: bool
) -> None:
    """Each of two rules has judged a hundred subjects. In the last case, two of the findings are acknowledged."""
    judged = []
    for number, (tolerance, count) in enumerate(zip(own, faults, strict=True)):
        rule = Rule(
            name=f"rule {number}", database="d", table="t", key="id", time="at", topic="x", fail_above=tolerance
        )
        counts = dict.fromkeys((name.value for name in CLASSES), 0) | {"LOST": count, "OK": 100 - count}
        scanned = SimpleNamespace(prepared=SimpleNamespace(rule=rule))
        judged.append(SimpleNamespace(confirmed=SimpleNamespace(scanned=scanned), counts={"": counts}))
    known = SimpleNamespace(rule="rule 0", first_acknowledged=2 if faults == (7, 0) else 0)
    found: Any = SimpleNamespace(rules=judged, causes=[known])
    rules: Any = SimpleNamespace(fail_above=of_file)
    assert _is_tolerated(found, rules) is is_tolerated
