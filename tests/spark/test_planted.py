"""Faults of every class, planted and found: by one run and by a chain of runs, over PostgreSQL, Parquet and CSV.

Each class, of messages and of groups, is planted as often as the others; found is exactly what was planted. The
watermark is given, so that all three kinds of source are cut at the same times.
"""

from __future__ import annotations

from datetime import datetime, timedelta
from pathlib import Path

import psycopg
import pytest

from spark.comparison.classify import FAULTS
from tests.spark.conftest import Reconciler
from tests.spark.test_files import copy_out, export_parquet
from tests.spark.world import GROUPS, RULES, START, Order, World, group_rules

pytestmark = pytest.mark.timeout(1200)

TABLES = ("orders_order", "logistics_shipment", "points_entry", "cart_clearance")
VIEWS = ("message_v1", "dead_letter_v1", "delivery_v1", "topic_v1", "group_v1", "offset_v1", "queue_entry_v1")
# Rows per planted set: every second one has a fault, but for the last.
STRIDE = 24
SPAN = timedelta(hours=6)
# Below the last cut even the longest limit has passed.
CUTS = {"batch": (SPAN * 2,), "incremental": (SPAN / 3, SPAN / 2, SPAN * 2)}
Found = tuple[str, str, str]


def plant(world: World, each: int) -> list[Found]:
    """`each` faults of every class among orders spread over SPAN; (key, group, class) of all of them."""
    world.add_many(STRIDE * each, every=SPAN / (STRIDE * each))
    return [fault for number in range(each) for fault in plant_one_of_each(world, number * STRIDE)]


def plant_one_of_each(world: World, base: int) -> list[Found]:
    orphan, stuck, lost, unreadable, double, dead, undelivered, differs, late, twice, slow = (
        base + step for step in range(1, STRIDE - 2, 2)
    )
    app, broker = world.app.execute, world.broker.execute
    app("DELETE FROM orders_order WHERE id = %s", [orphan])
    broker(
        "DELETE FROM op_log USING commit_log l WHERE l.key = %s AND l.transaction_id = op_log.transaction_id",
        [str(stuck)],
    )
    broker("DELETE FROM commit_log WHERE key = %s", [str(lost)])
    broker("UPDATE commit_log SET body = '\\x7b22' WHERE key = %s", [str(unreadable)])
    world.send(Order(number=double, at=paid_at(world, double)))
    app("DELETE FROM points_entry WHERE order_id = %s", [dead])
    log_id = world._one("SELECT log_id FROM commit_log WHERE key = %s", str(dead))
    world.kill_letter("points", log_id, paid_at(world, dead))
    app("DELETE FROM logistics_shipment WHERE order_id = %s", [undelivered])
    app("UPDATE orders_order SET total = total + 1 WHERE id = %s", [differs])
    broker(
        "UPDATE op_log SET decided_at = decided_at + interval '1 hour' FROM commit_log l "
        "WHERE l.key = %s AND l.transaction_id = op_log.transaction_id",
        [str(late)],
    )
    world.effect("cart", twice, paid_at(world, twice) + timedelta(seconds=5))
    app("UPDATE points_entry SET created_at = created_at + interval '1 hour' WHERE order_id = %s", [slow])
    nobody = 1_000_000 + base
    world.effect("cart", nobody, paid_at(world, slow))
    of_messages = {
        orphan: "ORPHAN", stuck: "HALF_STUCK", lost: "LOST", unreadable: "UNREADABLE", double: "DUPLICATE",
        differs: "MISMATCH", late: "LATE",
    }  # fmt: skip
    of_groups = [
        (dead, "points", "DEAD"), (undelivered, "logistics", "UNDELIVERED"), (twice, "cart", "DUPLICATE"),
        (slow, "points", "LATE"), (nobody, "cart", "ORPHAN"),
    ]  # fmt: skip
    return [(str(key), "", name) for key, name in of_messages.items()] + [(str(k), g, name) for k, g, name in of_groups]


def paid_at(world: World, number: int) -> datetime:
    row = world.app.execute("SELECT paid_at FROM orders_order WHERE id = %s", [number]).fetchone()
    assert row is not None
    paid: datetime = row[0]
    return paid


def export(world: World, kind: str, folder: Path) -> None:
    """Everything that the rules read, as `kind`."""
    folder.mkdir()
    sides: list[tuple[psycopg.Connection, tuple[str, ...]]] = [(world.app, TABLES), (world.broker, VIEWS)]
    for connection, tables in sides:
        for table in tables:
            if kind == "csv":
                copy_out(connection, f"(SELECT * FROM {table})", folder / f"{table}.csv")
            else:
                export_parquet(connection, table, folder / f"{table}.parquet")


def rules(kind: str, folder: Path, watermark: datetime) -> str:
    text = RULES.format(extra="", groups=group_rules(GROUPS))
    for name in ("APP", "BROKER"):
        place = f'env = "RECONCILE_{name}"' if kind == "postgres" else f'kind = "{kind}"\npath = "{folder}"'
        text = text.replace(f'env = "RECONCILE_{name}"', f'{place}\nwatermark = "{watermark.isoformat()}"')
    return text if kind == "postgres" else text.replace('schema = "outbox"\n', "")


@pytest.mark.parametrize("kind", ["postgres", "parquet", "csv"])
@pytest.mark.parametrize("mode", list(CUTS))
def test_exactly_what_was_planted_is_found(
    reconcile: Reconciler, world: World, tmp_path: Path, kind: str, mode: str
) -> None:
    find(reconcile, world, tmp_path / "export", kind=kind, mode=mode, each=1)


@pytest.mark.soak
@pytest.mark.parametrize("kind", ["postgres", "parquet", "csv"])
@pytest.mark.parametrize("mode", list(CUTS))
def test_exactly_what_was_planted_is_found_among_many(
    reconcile: Reconciler, world: World, tmp_path: Path, kind: str, mode: str
) -> None:
    find(reconcile, world, tmp_path / "export", kind=kind, mode=mode, each=25)


def find(reconcile: Reconciler, world: World, folder: Path, *, kind: str, mode: str, each: int) -> None:
    planted = plant(world, each)
    assert {name for _, _, name in planted} == {name.value for name in FAULTS}
    if kind != "postgres":
        export(world, kind, folder)
    found: list[Found] = []
    for number, cut in enumerate(CUTS[mode]):
        path = reconcile.rules(text=rules(kind, folder, START + cut))
        result = reconcile.run(rules=path, full=mode == "batch")
        found = reconcile.findings(result)
        is_last = number == len(CUTS[mode]) - 1
        assert set(found) <= set(planted), "nothing is found that was not planted, at any cut"
        assert is_last or 0 < len(found) < len(planted), "each cut leaves some to the next run"
    assert sorted(found) == sorted(planted)
