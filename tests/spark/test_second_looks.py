"""What only a second look finds: keys that are hard to read again, and messages after a row's window."""

from __future__ import annotations

import json
import uuid
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from pathlib import Path

import pytest
from pyspark.sql.readwriter import DataFrameWriter

from spark.common.errors import RunIncomplete
from spark.stages import sides
from tests.spark.conftest import Reconciler
from tests.spark.test_report import HOSTILE
from tests.spark.world import RULES, START, Order, World

pytestmark = pytest.mark.timeout(300)
INBOX = """
[[rule.group]]
name = "points"
table = "outbox_inbox"
message_id = "message_id"
time = "handled_at"
when = "consumer_group = 'points'"
within = "10m"

[[rule.group]]
name = "logistics"
within = "10m"
"""


def now() -> datetime:
    return datetime.now(UTC)


def move_boundary(reconcile: Reconciler, to: datetime) -> None:
    """As if the run in force had ended there: it cannot be waited for."""
    path = reconcile.folder / reconcile.output / "result.json"
    result = json.loads(path.read_text())
    for rule in result["rules"]:
        rule["until"] = to.isoformat()
    path.write_text(json.dumps(result))


@pytest.mark.slow
def test_an_effect_without_a_time_happened(reconcile: Reconciler, world: World) -> None:
    """The remedy of an UNDELIVERED would let it happen again."""
    reconcile.rules(groups=("cart",))
    world.add(Order(number=1), Order(number=2))
    world.app.execute("ALTER TABLE cart_clearance ALTER created_at DROP NOT NULL")
    world.app.execute("UPDATE cart_clearance SET created_at = NULL WHERE order_id = 1")
    assert reconcile.findings(reconcile.run()) == []


@pytest.mark.soak
def test_keys_of_19_digits_and_what_comes_to_an_older_row(reconcile: Reconciler, world: World) -> None:
    """Keys as snowflake ids are, up to the greatest bigint. Some rows were judged before a second message, a second
    effect, or the commit of a second half came."""
    reconcile.rules(groups=("logistics",))
    first, half = 2**63 - 10, uuid.uuid4()
    at = now() - timedelta(minutes=5)
    waiting, young = Order(number=first, at=at), Order(number=first + 1, at=at)
    world.pay(waiting)
    world.send(waiting)
    world.add(young)
    log_id = world.send(young, decision=None, message_id=half)
    world.add(*(Order(number=first + number) for number in (2, 3, 4)))
    world.app.execute("UPDATE orders_order SET total = 99 WHERE id = %s", [first + 4])
    world.pay(Order(number=first + 5))
    world.send(Order(number=2**63))
    expected = {
        (str(first + 4), "", "MISMATCH"),
        (str(first + 5), "", "LOST"),
        (str(2**63), "", "ORPHAN"),
    }
    assert set(reconcile.findings(reconcile.run())) == expected
    move_boundary(reconcile, at + timedelta(minutes=1))
    later = at + timedelta(minutes=2)
    world.decide(log_id, half, "C", later)
    world.send(Order(number=first + 2), stored_at=later, message_id=uuid.uuid4())
    world.effect("logistics", first + 3, later)
    second = reconcile.run()
    assert set(reconcile.findings(second)) == expected | {
        (str(first + 1), "", "DUPLICATE"),
        (str(first + 2), "", "DUPLICATE"),
        (str(first + 3), "logistics", "DUPLICATE"),
    }


@pytest.mark.soak
def test_hostile_and_missing_keys_go_through_a_whole_run(
    reconcile: Reconciler, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Read again by a query and, as when there are too many of them, by reading everything."""
    reconcile.rules(text=RULES.format(extra="", groups=INBOX).replace('column = "customer"', 'column = "status"'))
    world.app.execute("ALTER TABLE orders_order DROP CONSTRAINT orders_order_pkey, ALTER id DROP NOT NULL")
    world.app.execute("ALTER TABLE orders_order ALTER id TYPE text")
    keys = [key.replace("\x00", "") for key in [*HOSTILE, "{a,b}", '"', "\\", "null", "x' OR '1'='1"]]
    for key in keys:
        world.app.execute("INSERT INTO orders_order VALUES (%s, 'x', 1, 'paid', %s, %s)", [key, START, START])
    body = json.dumps({"status": "paid", "total": "1", "paid_at": START.isoformat()}).encode()
    for number in range(2):
        world.send(Order(number=number), body=body)
        world.app.execute("INSERT INTO orders_order VALUES (%s, 'x', 1, 'paid', %s, %s)", [str(number), START, START])
        world.broker.execute("UPDATE commit_log SET stored_at = %s WHERE key = %s", [START, str(number)])
    world.consume_all()
    message_id = world.broker.execute("SELECT message_id FROM commit_log WHERE key = '0'").fetchone()
    world.app.execute("INSERT INTO outbox_inbox VALUES ('points', 1, %s, %s)", [*(message_id or ()), START])
    world.app.execute("INSERT INTO orders_order VALUES (NULL, 'x', 1, 'paid', %s, %s)", [START, START])
    world.send(Order(number=77), body=body)
    world.broker.execute("UPDATE commit_log SET key = '' WHERE key = '77'")
    expected = {
        *((key, "", "LOST") for key in keys),
        ("1", "points", "UNDELIVERED"),
        ("", "", "UNREADABLE"),
        ("", "points", "UNDELIVERED"),
        ("", "logistics", "UNDELIVERED"),
    }
    result = reconcile.run()
    assert set(reconcile.findings(result)) == expected
    assert "is past a message, but not when the group passed it" in result["rules"][0]["notes"][0]
    monkeypatch.setattr(sides, "MAX_KEYS", 3)
    assert set(reconcile.findings(reconcile.run(full=True))) == expected


@pytest.mark.soak
def test_a_group_without_a_table_is_never_late(reconcile: Reconciler, world: World) -> None:
    """The offset that is kept is the newest: it says nothing of when an older message was passed."""
    groups = '\n[[rule.group]]\nname = "logistics"\nwithin = "10m"\n'
    reconcile.rules(text=RULES.format(extra="", groups=groups))
    world.add(Order(number=1), Order(number=2, at=START + timedelta(hours=2)))
    world.broker.execute("UPDATE consumer_offset SET stored_at = %s", [START + timedelta(hours=2, seconds=1)])
    world.send(Order(number=3))
    result = reconcile.run()
    assert reconcile.findings(result) == [("3", "", "ORPHAN")]
    assert all(row["effect_at"] is None for row in reconcile.rows(result))


@pytest.mark.slow
def test_output_that_only_executors_see_is_no_result(
    reconcile: Reconciler, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when they write to disks of their own: this process sees folders without parts."""
    original, lost = DataFrameWriter.parquet, [""]

    def parquet(writer: DataFrameWriter, path: str, *arguments: object, **options: object) -> None:
        original(writer, path, *arguments, **options)  # type: ignore[arg-type]
        if lost[0] in path:
            for part in Path(path.removeprefix("file://")).glob("part-*"):
                part.unlink()

    reconcile.rules(groups=())
    world.add(Order(number=1))
    world.pay(Order(number=500))
    monkeypatch.setattr(DataFrameWriter, "parquet", parquet)
    for lost[0] in ("/suspects/", "/confirmed/"):
        with pytest.raises(RunIncomplete, match=r"1 rows were written to .* finds 0 rows there: .* --output"):
            reconcile.run()
        assert not (reconcile.folder / "out" / "result.json").exists()


@pytest.mark.soak
def test_a_finding_beyond_the_boundary_is_not_recovered(reconcile: Reconciler, world: World) -> None:
    reconcile.rules(groups=())
    world.add(Order(number=1))
    world.pay(Order(number=50, at=now() - timedelta(minutes=2)))
    lost = [("50", "", "LOST")]
    assert reconcile.findings(reconcile.run()) == lost
    path = reconcile.folder / "reconcile.toml"
    held_back = (now() - timedelta(minutes=5)).isoformat()
    text = path.read_text()
    path.write_text(text.replace("[database.app]\n", f'[database.app]\nwatermark = "{held_back}"\n'))
    held = reconcile.run(full=True)
    assert reconcile.findings(held) == []
    assert held["open_subjects"] == 1, "the next run looks at it again"


@pytest.mark.slow
def test_a_hot_row_updated_between_the_snapshots_of_both_looks(
    reconcile: Reconciler, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = RULES.format(extra='messages = "at_least_one"', groups="").replace('time = "paid_at"', 'time = "created_at"')
    reconcile.rules(text=text.replace('\n[[rule.field]]\ncolumn = "paid_at"\ntype = "timestamp"\n', ""))
    world.add(Order(number=1))
    from spark.sources.postgres import PostgresSource

    opened, totals = PostgresSource.open, iter(range(20, 30))

    def opens(source: PostgresSource, timed: object) -> object:
        reading = opened(source, timed)  # type: ignore[arg-type]
        if reading.database == "app":
            total = Decimal(next(totals))
            world.app.execute("UPDATE orders_order SET total = %s", [total])
            world.send(Order(number=1, total=total), stored_at=now(), message_id=uuid.uuid4())
        return reading

    monkeypatch.setattr(PostgresSource, "open", opens)
    result = reconcile.run()
    assert reconcile.findings(result) == []
    assert result["open_subjects"] == 1, "the next run looks at it again"
