"""The broker's log in the archive: complete and without doubles, and read as if retention had removed nothing."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import uuid
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from outbox.broker.database.executor import Executor
from outbox.broker.log.recall import recall
from outbox.broker.maintenance import retention
from spark import archive
from spark.common.errors import RunIncomplete, UsageProblem
from spark.common.progress import Progress
from spark.common.store import Store
from spark.rules import file as rules_file
from spark.sources.archived import Gap, Pass, load_manifest
from tests.spark.conftest import Reconciler
from tests.spark.test_processes import KILLS, ROOT, SMALL, environment, kill_at
from tests.spark.world import RULES, START, Order, World, group_rules

pytestmark = pytest.mark.timeout(600)
GROUPS = ("logistics", "points")


def archived_rules(folder: Path, *, groups: str = "", path: str = "archive") -> str:
    text = RULES.format(extra="", groups=groups)
    return text.replace('database = "broker"\n', f'database = "broker"\narchive = "{folder / path}"\n', 1)


def take(reconcile: Reconciler, path: Path) -> tuple[Pass | None, list[Gap]]:
    return archive.Archive(reconcile.spark, rules_file.load(path), Progress(io.StringIO())).run()


def held(folder: Path) -> list[int]:
    """The log ids of all files that are there, named or not."""
    files = sorted((folder / "archive" / "message_v1").rglob("*.parquet"))
    return sorted(number for file in files for number in pq.read_table(file, columns=["log_id"])["log_id"].to_pylist())


def sent(world: World) -> list[int]:
    return [row[0] for row in world.broker.execute("SELECT log_id FROM commit_log ORDER BY 1")]


def let_go(world: World) -> int:
    """Let retention remove messages: all orders are old, and every group is past them."""
    return retention.run_once(Executor(world.broker, "outbox")).messages


def plant_some(world: World) -> set[tuple[str, str, str]]:
    world.app.execute("DELETE FROM orders_order WHERE id = 1")
    world.app.execute("UPDATE orders_order SET total = total + 1 WHERE id = 2")
    world.app.execute("DELETE FROM points_entry WHERE order_id = 3")
    world.pay(Order(number=500))
    return {("1", "", "ORPHAN"), ("2", "", "MISMATCH"), ("3", "points", "UNDELIVERED"), ("500", "", "LOST")}


@pytest.mark.soak
def test_findings_are_the_same_before_and_after_retention(reconcile: Reconciler, world: World, tmp_path: Path) -> None:
    world.add_many(30)
    world.broker.execute("UPDATE commit_log SET tag = 'día', key = key || ' ''\"' WHERE key = '30'")
    world.app.execute("DELETE FROM orders_order WHERE id = 30")
    planted = plant_some(world) | {("30 '\"", "", "ORPHAN")}
    for group in GROUPS:
        world.app.execute(
            f"DELETE FROM {'logistics_shipment' if group == 'logistics' else 'points_entry'} WHERE order_id = 30"
        )
    path = reconcile.rules(text=archived_rules(tmp_path, groups=group_rules(GROUPS)))
    made, gaps = take(reconcile, path)
    assert made is not None and made.count == 30 and gaps == []
    assert let_go(world) == 30
    world.add(Order(number=31, at=datetime.now(UTC)))
    result = reconcile.run(full=True)
    assert set(reconcile.findings(result)) == planted
    assert result["rules"][0]["since"] is None, "everything is judged, as if nothing had been removed"
    assert {row["key"]: row["message_id"] for row in reconcile.rows(result)}["1"], "a finding shows its message"

    made, gaps = take(reconcile, path)
    assert made is not None and made.count == 1 and gaps == []
    assert set(reconcile.findings(reconcile.run(full=True))) == planted, "what is in both places counts once"


BY_ID = """
[[rule.group]]
name = "points"
table = "outbox_inbox"
message_id = "message_id"
time = "handled_at"
when = "consumer_group = 'points'"
within = "10m"
"""


@pytest.mark.slow
def test_effects_are_found_by_the_ids_of_archived_messages(reconcile: Reconciler, world: World, tmp_path: Path) -> None:
    """By rules with each number of messages per row: from log and archive, and from the archive alone."""
    orders = [Order(number=number) for number in range(1, 6)]
    strange, second = uuid.uuid4(), uuid.uuid4()
    for order in orders:
        world.pay(order)
        world.send(order)
    world.send(orders[3], message_id=second, stored_at=START + timedelta(seconds=1))
    world.consume_all()
    for message_id in (strange, *(order.message_id for order in orders if order.number != 3)):
        world.app.execute("INSERT INTO outbox_inbox VALUES ('points', 1, %s, %s)", [message_id, START])
    head, _, rule = archived_rules(tmp_path, groups=BY_ID).partition('[[rule]]\nname = "order-paid"')
    numbers = ("exactly_one", "at_least_one")
    both = head + "".join(f'[[rule]]\nname = "{number}"\nmessages = "{number}"{rule}' for number in numbers)
    take(reconcile, reconcile.rules(text=both))
    assert let_go(world) == 6
    world.add(Order(number=90, at=datetime.now(UTC)))
    for name, text in (("both", both), ("alone", alone_rules(both, tmp_path))):
        reconcile.rules(text=text)
        reconcile.output = name
        rows = reconcile.rows(reconcile.run(full=True))
        found = {(row["rule"], row["key"], row["group"], row["class"]): row["message_id"] for row in rows}
        third = {(number, "3", "points", "UNDELIVERED"): str(orders[2].message_id) for number in numbers}
        assert found == third | {
            ("exactly_one", "4", "", "DUPLICATE"): str(second),
            ("at_least_one", "4", "points", "UNDELIVERED"): str(second),
            **{(number, str(strange), "points", "ORPHAN"): None for number in numbers},
        }, name


def alone_rules(text: str, folder: Path) -> str:
    """The rules with the archive alone as the broker."""
    text = text.replace('env = "RECONCILE_BROKER"', f'kind = "archive"\npath = "{folder / "archive"}"')
    return text.replace('schema = "outbox"\n', "").replace(f'archive = "{folder / "archive"}"\n', "")


@pytest.mark.slow
def test_without_an_archive_what_was_removed_is_not_judged(reconcile: Reconciler, world: World, tmp_path: Path) -> None:
    world.add_many(5)
    path = reconcile.rules(text=archived_rules(tmp_path))
    take(reconcile, path)
    let_go(world)
    world.add(Order(number=6))
    reconcile.rules(text=RULES.format(extra="allow_empty = true", groups=""))
    assert reconcile.run(full=True)["rules"][0]["since"] is not None


@pytest.mark.slow
def test_a_gap_is_reported_and_what_lies_before_it_is_not_judged(
    reconcile: Reconciler, world: World, tmp_path: Path
) -> None:
    world.add_many(5)
    path = reconcile.rules(text=archived_rules(tmp_path).replace("stuck_after", "allow_empty = true\nstuck_after"))
    take(reconcile, path)
    world.add_many(3, first=6)
    assert let_go(world) == 8
    result = reconcile.run(full=True)
    assert (result["totals"]["LOST"], result["rules"][0]["since"] is None) == (0, False)
    made, gaps = take(reconcile, path)
    assert [(gap.topic, gap.messages) for gap in gaps] == [("order.paid", 3)]
    assert made is not None and made.count == 0
    assert take(reconcile, path)[1] == [], "reported once"
    assert reconcile.run(full=True)["rules"][0]["since"] is not None


@pytest.mark.slow
def test_a_message_that_is_recalled_after_it_was_due_is_archived_once(
    reconcile: Reconciler, world: World, tmp_path: Path
) -> None:
    """It is not in its queue, because no leader runs. And a log that a restore has set back has no gap."""
    world.add_many(2)
    order, due = Order(number=9), START + timedelta(minutes=5)
    late = world.send(order, deliver_at=due)
    world.broker.execute("DELETE FROM consume_queue WHERE log_id = %s", [late])
    world.broker.execute("INSERT INTO scheduled (log_id, due_at) VALUES (%s, %s)", [late, due])
    path = reconcile.rules(text=archived_rules(tmp_path))
    made, gaps = take(reconcile, path)
    assert made is not None and (made.until, made.count, gaps) == (due.isoformat(), 2, [])
    [outcome] = recall(Executor(world.broker, "outbox"), [order.message_id])
    assert outcome.is_recalled
    made, gaps = take(reconcile, path)
    assert made is not None and (made.count, gaps) == (1, [])
    assert held(tmp_path) == sent(world)

    world.broker.execute("DELETE FROM commit_log WHERE key = '1'")
    assert [gap.messages for gap in take(reconcile, path)[1]] == [-1]
    manifest = load_manifest(Store(str(tmp_path / "archive")))
    assert manifest is not None and manifest.complete_from("order.paid") is None
    assert take(reconcile, path)[1] == [], "reported once"


@pytest.mark.slow
def test_an_archive_belongs_to_a_broker_and_not_to_its_server(
    reconcile: Reconciler, world: World, tmp_path: Path
) -> None:
    path = reconcile.rules(text=archived_rules(tmp_path))
    take(reconcile, path)
    manifest = tmp_path / "archive" / "archive.json"
    text = manifest.read_text()
    [(broker, former)] = world.broker.execute(
        "SELECT broker_id::text, current_database() || ' ' || control.system_identifier "
        "FROM broker, pg_control_system() AS control"
    )
    assert json.loads(text)["broker"] == broker, "pg_upgrade, a restore, and a dump and load keep it"
    manifest.write_text(text.replace(broker, former))
    take(reconcile, path)
    assert json.loads(manifest.read_text())["broker"] == broker
    manifest.write_text(text.replace(broker, "of another server"))
    with pytest.raises(UsageProblem, match=f'pg_upgrade or a restore, write "broker": "{broker}" into archive.json'):
        take(reconcile, path)


@pytest.mark.slow
def test_two_passes_at_once(reconcile: Reconciler, world: World, tmp_path: Path) -> None:
    path = reconcile.rules(text=archived_rules(tmp_path))
    with world.broker.transaction():
        world.broker.execute("SELECT pg_advisory_xact_lock(hashtextextended('outbox-reconcile archive', 0))")
        with pytest.raises(RunIncomplete, match="another pass over this broker is running"):
            take(reconcile, path)


class Stopper(Progress):
    """Ends the pass as it enters a stage."""

    def __init__(self, stage: str) -> None:
        super().__init__(io.StringIO())
        self._stage = stage

    def say(self, text: str) -> None:
        if text.startswith(f"stage {self._stage}:"):
            raise KeyboardInterrupt


@pytest.mark.slow
def test_a_pass_that_ends_in_the_middle_is_taken_again(reconcile: Reconciler, world: World, tmp_path: Path) -> None:
    world.add_many(20)
    path = reconcile.rules(text=archived_rules(tmp_path))
    for stage in ("write", "verify", "publish"):
        work = archive.Archive(reconcile.spark, rules_file.load(path), Stopper(stage))
        with pytest.raises(KeyboardInterrupt):
            work.run()
        assert not (tmp_path / "archive" / "archive.json").exists()
    assert held(tmp_path) == sent(world), "it ended with everything written, and nothing named"
    for _ in range(2):
        take(reconcile, path)
        assert held(tmp_path) == sent(world), "complete, and nothing twice"


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_kill_9_five_times_in_each_stage_then_again(world: World, tmp_path: Path) -> None:
    world.add_many(20)
    path = tmp_path / "reconcile.toml"
    path.write_text(archived_rules(tmp_path))

    for stage in ("write", "verify") * KILLS:
        assert kill_at(start(world, path), stage), stage
        assert not (tmp_path / "archive" / "archive.json").exists()
    assert held(tmp_path) == sent(world), "it was killed with everything written, and nothing named"
    for _ in range(KILLS):
        # A kill may come after the pass is in force. Then the next pass has nothing to publish.
        is_killed = kill_at(start(world, path), "publish")
        assert is_killed or (tmp_path / "archive" / "archive.json").exists()
    for _ in range(2):
        with start(world, path) as process:
            _, said = process.communicate()
        assert process.returncode == 0, said
        assert held(tmp_path) == sent(world), "complete, and nothing twice"
    manifest = json.loads((tmp_path / "archive" / "archive.json").read_text())
    assert sum(each["count"] for each in manifest["passes"]) == 20
    assert (tmp_path / "archive").stat().st_mode & 0o777 == 0o700


def start(world: World, rules: Path) -> subprocess.Popen[str]:
    """The command as a process that leads a group of its own, with its JVM in it."""
    return subprocess.Popen(
        [sys.executable, "-m", "spark", "archive", "--rules", str(rules), *SMALL],
        cwd=ROOT,
        env=environment(world),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_a_year_is_judged_from_the_archive_alone(reconcile: Reconciler, world: World, tmp_path: Path) -> None:
    """A pass over a year, and one after retention. The rows are read from their own database.

    Each fourth day has a message, because each day of a pass is a folder, and Spark takes its time for each folder.
    """
    year = timedelta(days=365)
    world.add_many(92, every=timedelta(days=4))
    planted = plant_some(world)
    stuck = Order(number=600, at=START + year / 2)
    world.pay(stuck)
    world.send(stuck, decision=None)
    world.kill_letter("logistics", world._one("SELECT log_id FROM commit_log WHERE key = '7'"), START)
    late = world._one("SELECT log_id FROM commit_log WHERE key = '8'")
    world.app.execute("DELETE FROM points_entry WHERE order_id = 8")
    world.broker.execute(
        "INSERT INTO timed_out (group_id, log_id, queue_id, queue_offset, timed_out_at) VALUES (%s, %s, %s, 7, %s)",
        [world.groups["points"], late, world.queue_id, START + timedelta(days=32)],
    )
    planted |= {("600", "", "HALF_STUCK"), ("7", "logistics", "DEAD")}
    path = reconcile.rules(text=archived_rules(tmp_path, groups=group_rules(GROUPS)))
    made, gaps = take(reconcile, path)
    assert made is not None and (made.count, gaps) == (92, [])
    assert let_go(world) > 75
    take(reconcile, path)
    assert set(reconcile.findings(reconcile.run(full=True))) == planted, "archive and log together"

    reconcile.output = "alone"
    path.write_text(alone_rules(path.read_text(), tmp_path))
    result = reconcile.run(full=True)
    assert set(reconcile.findings(result)) == planted, "the archive alone"
    assert result["rules"][0]["messages_read"] == 93
