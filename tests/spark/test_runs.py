"""Whole runs over two real databases."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import psycopg
import pytest

from spark import pipeline
from spark.common.errors import RunIncomplete
from spark.common.options import RunOptions
from spark.rules import file as rules_file
from spark.sources.databases import Sources
from spark.stages import confirm
from spark.stages.checksums import ComparedChecksums
from spark.stages.job import Job
from spark.stages.scan import scan
from tests.spark.conftest import Reconciler
from tests.spark.frames import whole
from tests.spark.world import GROUPS, START, Order, World

HOUR = timedelta(hours=1)
# Whole runs: seconds on a free machine, minutes on one that does five other things.
pytestmark = pytest.mark.timeout(600)


def now() -> datetime:
    return datetime.now(UTC)


def plant(world: World) -> set[tuple[str, str, str]]:
    """One fault of each class, by hand; returns them as (key, group, class)."""
    execute = world.app.execute
    execute("DELETE FROM orders_order WHERE id = 1")
    world.broker.execute(
        "DELETE FROM op_log USING commit_log l WHERE l.key = '2' AND l.transaction_id = op_log.transaction_id"
    )
    (half,) = world.broker.execute("SELECT transaction_id FROM commit_log WHERE key = '2'").fetchone() or (None,)
    assert half is not None
    world.check(half, "UNKNOWN", "it is still running", START)
    world.broker.execute("DELETE FROM commit_log WHERE key = '3'")
    world.broker.execute("UPDATE commit_log SET body = '\\x7b22' WHERE key = '4'")
    world.send(Order(number=5))
    log_id = world._one("SELECT log_id FROM commit_log WHERE key = '6'")
    execute("DELETE FROM points_entry WHERE order_id = 6")
    world.kill_letter("points", log_id, START)
    world.fail("points", log_id, 16, "ValueError: boom", START)
    execute("DELETE FROM logistics_shipment WHERE order_id = 7")
    execute("UPDATE orders_order SET total = total + 1 WHERE id = 8")
    world.broker.execute(
        "UPDATE op_log SET decided_at = decided_at + interval '1 hour' FROM commit_log l "
        "WHERE l.key = '9' AND l.transaction_id = op_log.transaction_id"
    )
    world.effect("cart", 10, START + timedelta(seconds=5))
    world.effect("cart", 5001, START)
    execute("UPDATE points_entry SET created_at = created_at + interval '1 hour' WHERE order_id = 11")
    return {
        ("1", "", "ORPHAN"),
        ("2", "", "HALF_STUCK"),
        ("3", "", "LOST"),
        ("4", "", "UNREADABLE"),
        ("5", "", "DUPLICATE"),
        ("6", "points", "DEAD"),
        ("7", "logistics", "UNDELIVERED"),
        ("8", "", "MISMATCH"),
        ("9", "", "LATE"),
        ("10", "cart", "DUPLICATE"),
        ("5001", "cart", "ORPHAN"),
        ("11", "points", "LATE"),
    }


def repair(world: World) -> None:
    """Undo `plant`, as an operator would."""
    world.pay(Order(number=1, total=Decimal("1.50")))
    world.app.execute("UPDATE orders_order SET customer = 'customer 1' WHERE id = 1")
    world.broker.execute("DELETE FROM commit_log WHERE key IN ('4', '5', '9', '2', '8')")
    for number in (2, 3, 4, 5, 8, 9):
        row = world.app.execute("SELECT total, paid_at FROM orders_order WHERE id = %s", [number]).fetchone()
        assert row is not None
        world.send(Order(number=number, total=row[0], at=row[1]))
    world.broker.execute("UPDATE dead_letter SET replayed_at = now()")
    world.effect("points", 6, START)
    world.effect("logistics", 7, START)
    world.app.execute(
        "DELETE FROM cart_clearance WHERE order_id = 5001 "
        "OR id = (SELECT max(id) FROM cart_clearance WHERE order_id = 10)"
    )
    world.app.execute("UPDATE points_entry SET created_at = created_at - interval '1 hour' WHERE order_id = 11")


@pytest.mark.slow
# Five runs over one world; beside four other workers they take eight minutes. The limit only ends a run that hangs.
@pytest.mark.timeout(1200)
def test_k_planted_faults_exactly_those_k_rerun_identical_clean_after_repair(
    reconcile: Reconciler, world: World, tmp_path: Path
) -> None:
    reconcile.rules(groups=GROUPS)
    world.add_many(300)
    planted = plant(world)
    first = reconcile.run(full=True, metrics=tmp_path / "outbox.prom")
    rows = reconcile.rows(first)
    assert {(row["key"], row["group"], row["class"]) for row in rows} == planted
    assert len(rows) == len(planted)
    assert pipeline.exit_code(first) == 1
    assert first["faults"] == len(planted)
    assert first["rules"][0]["counts"]["OK"] == 300 - 7
    assert f'outbox_reconcile_faults{{rules="reconcile"}} {len(planted)}' in (tmp_path / "outbox.prom").read_text()
    by_class = {(row["class"], row["group"]): row for row in rows}
    assert by_class["MISMATCH", ""]["detail"] == "row and body differ: total 9.5 in the row, 8.5 in the body"
    assert by_class["UNDELIVERED", "logistics"]["delivery"] == "passed"
    assert by_class["ORPHAN", ""]["detail"].endswith("acted on by: logistics, points, cart")
    say_what_they_rest_on(by_class)
    assert "Row, messages and effects" in (reconcile.folder / "out" / "report.html").read_text()

    second = reconcile.run(full=True)
    assert [without_times(row) for row in reconcile.rows(second)] == [without_times(row) for row in rows]
    assert [row["first_seen"] for row in reconcile.rows(second)] == [row["first_seen"] for row in rows]

    repair(world)
    third = reconcile.run()
    assert set(reconcile.findings(third)) == {(key, group, "RECOVERED") for key, group, _ in planted}
    assert pipeline.exit_code(third) == 0
    assert [sum(each["open"].values()) for each in third["last_runs"]] == [len(planted), len(planted), 0]


def say_what_they_rest_on(by_class: dict[tuple[str, str], dict[str, Any]]) -> None:
    """How late, which body and why, which messages; and the remedy with the finding's own ids."""
    details = {subject: row["detail"] for subject, row in by_class.items()}
    unreadable, duplicate = by_class["UNREADABLE", ""], by_class["DUPLICATE", ""]
    assert details["LATE", ""] == "the message was committed 1:00:00.005 after the row's time; the limit is 0:05:00"
    assert details["ORPHAN", "cart"] == "an effect of cart has no committed message, and no row satisfies the rule"
    assert details["LOST", ""] == "the row has no committed message; acted on by: logistics, points, cart"
    assert details["LATE", "points"] == "the effect of points came 1:00:01 after it was due; the limit is 0:10:00"
    assert details["UNREADABLE", ""] == (
        f"message {unreadable['message_id']}: the body is not JSON: "
        "Unterminated string starting at: line 1 column 2 (char 1)"
    )
    assert f"the newest {duplicate['message_id']}), rows: 1" in details["DUPLICATE", ""]
    for row in by_class.values():
        assert row["remedy"].startswith("Check first: ")
        assert "{" not in row["remedy"], "an effect without a message has no message to trace"
    known = json.loads(by_class["ORPHAN", ""]["evidence"])
    assert [(each["state"], each["decided_by"]) for each in known["messages"]] == [("committed", "P")]
    assert [(each["group"], each["effects"]) for each in known["effects"]] == [(name, 1) for name in GROUPS]
    assert {(each["group"], each["delivery"]) for each in known["deliveries"]} == {(name, "passed") for name in GROUPS}
    dead, stuck = by_class["DEAD", "points"], by_class["HALF_STUCK", ""]
    assert dead["remedy"].endswith(f"`python manage.py outbox_dead_letter replay points {dead['message_id']}`.")
    assert f"outbox_transaction decide {stuck['transaction_id']} commit" in stuck["remedy"]


def without_times(row: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in row.items() if name not in ("first_seen", "was")}


@pytest.mark.soak
def test_incremental_runs_carry_over_what_was_pending_and_see_late_commits(reconcile: Reconciler, world: World) -> None:
    """Out-of-order sequence commit: an order paid long before, in a transaction that commits after the first run."""
    reconcile.rules(groups=("logistics",))
    world.add_many(50)
    pending = Order(number=900, at=now() - timedelta(minutes=2))
    world.pay(pending)
    world.send(pending)
    fresh = Order(number=901, at=now() + HOUR)
    world.pay(fresh)
    with psycopg.connect(world.app_url) as slow:
        started = now()
        late = Order(number=800, at=started)
        world.pay(late, slow)
        first = reconcile.run()
        assert reconcile.findings(first) == []
        boundary = datetime.fromisoformat(first["rules"][0]["until"])
        held_at = datetime.fromisoformat(first["started_at"]) - timedelta(seconds=30)
        assert boundary < held_at, "an open transaction holds the boundary back"
        assert first["totals"]["PENDING"] >= 1
        slow.commit()
    world.app.execute("UPDATE orders_order SET paid_at = paid_at - interval '20 minutes' WHERE id IN (800, 900)")
    earlier = Order(number=900, at=pending.at - timedelta(minutes=20))
    world.broker.execute(
        "UPDATE commit_log SET stored_at = %s, body = %s WHERE key = '900'", [earlier.at, earlier.body]
    )
    world.broker.execute(
        "UPDATE op_log SET decided_at = %s WHERE transaction_id = %s", [earlier.at, pending.message_id]
    )
    # As if the boundary of the first run had been before both: it cannot be waited for.
    path = reconcile.folder / "out" / "result.json"
    result = json.loads(path.read_text())
    result["rules"][0]["until"] = (boundary - timedelta(minutes=30)).isoformat()
    path.write_text(json.dumps(result))

    second = reconcile.run()
    assert set(reconcile.findings(second)) == {("800", "", "LOST"), ("900", "logistics", "UNDELIVERED")}
    assert second["rules"][0]["rows_read"] < 50, "an incremental run reads the window, not the table"

    repaired = Order(number=800, at=late.at - timedelta(minutes=20))
    world.send(repaired)
    world.effect("logistics", 800, repaired.at)
    world.effect("logistics", 900, earlier.at)
    third = reconcile.run()
    assert set(reconcile.findings(third)) == {("800", "", "RECOVERED"), ("900", "logistics", "RECOVERED")}


@pytest.mark.slow
def test_row_updated_and_rows_committed_between_the_two_snapshots(reconcile: Reconciler, world: World) -> None:
    """The first look is misled, the second is not; a transaction open across the snapshot is no finding either."""
    path = reconcile.rules(groups=())
    world.add_many(5)
    rules = rules_file.load(path)
    rule, sources = rules.rules[0], Sources(reconcile.spark, rules)
    job = Job.of(RunOptions(rules=path, output=str(reconcile.folder / "out")))
    with psycopg.connect(world.app_url) as across:
        open_order = Order(number=70)
        world.pay(open_order, across)
        world.send(open_order, decision=None, stored_at=now())
        sources["app"].open([])
        world.app.execute("UPDATE orders_order SET total = 99 WHERE id = 2")
        world.broker.execute(
            "UPDATE commit_log SET body = %s WHERE key = '2'", [Order(number=2, total=Decimal(99)).body]
        )
        world.add(Order(number=60))
        sources.broker.open([])
        scanned = scan(reconcile.spark, whole(rule), ComparedChecksums(), job, sources)
        suspects = reconcile.spark.read.parquet(scanned.suspects).where("class <> 'PENDING'")
        assert {(row["key"], row["class"]) for row in suspects.collect()} == {("2", "MISMATCH"), ("60", "ORPHAN")}
        world.app.execute("UPDATE orders_order SET paid_at = %s WHERE id = 2", [START])
        sources.close_all()
        sources.open_all()
        (wanted,) = confirm.collect(reconcile.spark, [scanned], None)
        again = confirm.confirm(wanted, job, sources)
        sources.close_all()
    assert wanted.count == 2 and again.target is not None
    confirmed = reconcile.spark.read.schema(confirm.SCHEMA).parquet(again.target)
    assert [(row["key"], row["class"], row["detail"]) for row in confirmed.collect()] == []


@pytest.mark.slow
def test_intervals_of_a_scheduler(reconcile: Reconciler, world: World) -> None:
    """Exactly the rows of the interval, the same findings however often; one that is not over yet is incomplete."""
    reconcile.rules(groups=())
    for hour in range(3):
        world.add(Order(number=hour + 1, at=START + hour * HOUR))
        world.pay(Order(number=hour + 11, at=START + hour * HOUR))
    # Sent long before its row's time: read again by key, found, and not this interval's.
    world.pay(Order(number=21, at=START + 5 * HOUR))
    world.send(Order(number=21, at=START + 5 * HOUR), stored_at=START + HOUR)
    since, until = START + HOUR, START + 2 * HOUR
    result = reconcile.run(since=since, until=until)
    assert reconcile.findings(result) == [("12", "", "LOST")]
    assert result["mode"] == "interval"
    with pytest.raises(RunIncomplete, match=r"the interval ends at .* Repeat the run later"):
        reconcile.run(since=now() - HOUR, until=now() + HOUR)
    in_force = json.loads((reconcile.folder / "out" / "result.json").read_text())
    assert in_force["run"] == result["run"]
    # Nothing happened in it, which is no reason to stop a scheduler.
    quiet = reconcile.run(since=START - 2 * HOUR, until=START - HOUR)
    assert (quiet["status"], quiet["rules"][0]["rows_read"], quiet["faults"]) == ("clean", 0, 0)
