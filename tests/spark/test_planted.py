"""Faults of every class, planted and found: by one run and by a chain of runs, over PostgreSQL, Parquet and CSV.

Each class, of messages and of groups, is planted as often as the others, and live writers go on beside them; found is
exactly what was planted. Up to the last cut the watermark is given, so that all kinds of source are cut at the same
times; then everything is judged, as far as it is complete while others write.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import nullcontext
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from spark.rules.rule import FAULTS
from tests.spark.conftest import Reconciler
from tests.spark.exports import export
from tests.spark.world import GROUPS, RULES, START, Order, World, group_rules
from tests.spark.writers import writing

pytestmark = pytest.mark.timeout(1200)

KINDS = ("postgres", "parquet", "csv")
# Rows per planted set: every second one has a fault, but for the last.
STRIDE = 24
SPAN = timedelta(hours=6)
# Where earlier looks end; the last one goes as far as it can.
CUTS: dict[str, tuple[timedelta, ...]] = {
    "batch": (),
    "incremental": (SPAN / 2, SPAN / 3 * 2),
}
# Work that live writers leave undone is not overdue during the test; planted faults are long overdue. There is no grace
# period, so the protocol alone has to be right, and rows written a moment ago are judged.
LIMITS = {"within": "2h", "stuck_after": "2h", "late_after": "2h", "grace": "0s"}
OVERDUE = "3 hours"
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
        f"UPDATE op_log SET decided_at = decided_at + interval '{OVERDUE}' FROM commit_log l "
        "WHERE l.key = %s AND l.transaction_id = op_log.transaction_id",
        [str(late)],
    )
    world.effect("cart", twice, paid_at(world, twice) + timedelta(seconds=5))
    app(f"UPDATE points_entry SET created_at = created_at + interval '{OVERDUE}' WHERE order_id = %s", [slow])
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


def rules(kind: str, folder: Path, watermark: datetime | None) -> str:
    text = RULES.format(extra="", groups=group_rules(GROUPS))
    for name, limit in LIMITS.items():
        text, count = re.subn(rf'^{name} = ".*"', f'{name} = "{limit}"', text, flags=re.MULTILINE)
        assert count, name
    complete = f'\nwatermark = "{watermark.isoformat()}"' if watermark else ""
    for name in ("APP", "BROKER"):
        place = f'env = "RECONCILE_{name}"' if kind == "postgres" else f'kind = "{kind}"\npath = "{folder}"'
        text = text.replace(f'env = "RECONCILE_{name}"', place + complete)
    return text if kind == "postgres" else text.replace('schema = "outbox"\n', "")


# Each kind of source and each way to run once. The slow run of test_matrix.py and test_runs.py prove the same sooner.
@pytest.mark.soak
@pytest.mark.parametrize(("kind", "mode"), [("postgres", "incremental"), ("parquet", "incremental"), ("csv", "batch")])
def test_exactly_what_was_planted_is_found(
    reconcile: Reconciler, world: World, tmp_path: Path, kind: str, mode: str
) -> None:
    find(reconcile, world, tmp_path / "export", kind=kind, mode=mode, each=1, cuts=CUTS[mode][:1])


@pytest.mark.soak
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mode", list(CUTS))
def test_exactly_what_was_planted_is_found_among_many_while_others_write(
    reconcile: Reconciler, world: World, tmp_path: Path, kind: str, mode: str
) -> None:
    find(reconcile, world, tmp_path / "export", kind=kind, mode=mode, each=25, cuts=CUTS[mode], is_live=True)


def find(
    reconcile: Reconciler,
    world: World,
    folder: Path,
    *,
    kind: str,
    mode: str,
    each: int,
    cuts: Sequence[timedelta],
    is_live: bool = False,
) -> None:
    planted = plant(world, each)
    assert {name for _, _, name in planted} == {name.value for name in FAULTS}
    with writing(world) if is_live else nullcontext() as writers:
        for cut in cuts:
            if kind != "postgres":
                export(world, kind, folder)
            found = reconcile.findings(look(reconcile, mode, rules(kind, folder, START + cut)))
            assert found and set(found) < set(planted), "some are left to the next look, and nothing else is found"
            if writers is not None:
                writers.kill_one()
        complete = None if kind == "postgres" else export(world, kind, folder)
        last = look(reconcile, mode, rules(kind, folder, complete))
    assert sorted(reconcile.findings(last)) == sorted(planted)
    if is_live:
        began = world.app.execute("SELECT min(paid_at) FROM orders_order WHERE id > 10000000").fetchone()
        assert began is not None
        assert datetime.fromisoformat(last["rules"][0]["until"]) > began[0], "what others wrote was judged too"


def look(reconcile: Reconciler, mode: str, text: str) -> dict[str, Any]:
    """The result of one more look at everything that is there."""
    path = reconcile.rules(text=text)
    return reconcile.run(rules=path, full=mode == "batch")
