"""A chain of incremental runs gives the classes of one run over everything, wherever it is cut."""

from __future__ import annotations

from datetime import datetime, timedelta
from random import Random

import pytest

from spark.rules.rule import FAULTS
from tests.spark import oracle, timelines
from tests.spark.conftest import Reconciler
from tests.spark.oracle import GRACE, GROUPS, UNTIL, WATERMARK
from tests.spark.test_second_looks import move_boundary
from tests.spark.timelines import BEGIN, HOUR, Timeline
from tests.spark.world import START, Order, World

pytestmark = pytest.mark.timeout(900)
KEYS = 2_000
RULES = """
version = 1
[database.files]
kind = "parquet"
path = "{folder}"
watermark = "{watermark}"
[broker]
database = "files"
[[rule]]
name = "order-paid"
database = "files"
table = "orders_order"
key = "id"
time = "paid_at"
topic = "order.paid"
grace = "30s"
late_after = "5m"
stuck_after = "15m"
[[rule.field]]
column = "customer"
[[rule.field]]
column = "total"
body = "price.total"
type = "decimal"
[[rule.group]]
name = "logistics"
table = "work"
key = "k"
time = "t"
within = "10m"
[[rule.group]]
name = "points"
table = "inbox"
message_id = "message_id"
time = "handled_at"
within = "10m"
"""
Found = dict[tuple[str, str], str]


def judged(
    reconcile: Reconciler, all_of_it: dict[str, Timeline], strays: dict[str, datetime], watermark: datetime, output: str
) -> Found:
    """The findings of a run at a moment."""
    folder = reconcile.folder / "exports"
    folder.mkdir(exist_ok=True)
    timelines.export(all_of_it, strays, watermark, folder)
    reconcile.output = output
    path = reconcile.rules(text=RULES.format(folder=folder, watermark=watermark.isoformat()))
    rows = reconcile.rows(reconcile.run(rules=path))
    return {(row["key"], row["group"]): row["class"] for row in rows if row["class"] in FAULTS}


def expected(all_of_it: dict[str, Timeline], strays: dict[str, datetime]) -> Found:
    """By the oracle, at the last moment."""
    wanted = {(name, "points"): "ORPHAN" for name, at in strays.items() if at < UNTIL}
    for key, timeline in all_of_it.items():
        for group, found in oracle.expected(timeline.at(WATERMARK)):
            if found in FAULTS:
                wanted[key, group] = found
    return wanted


@pytest.mark.soak
def test_batch_and_incremental_give_the_same_verdicts(reconcile: Reconciler, monkeypatch: pytest.MonkeyPatch) -> None:
    """Random histories of thousands of keys, cut at a random moment; both give the classes of the oracle."""
    cut_and_compare(reconcile, monkeypatch, 1)


@pytest.mark.soak
def test_batch_and_many_incremental_runs_give_the_same_verdicts(
    reconcile: Reconciler, monkeypatch: pytest.MonkeyPatch
) -> None:
    cut_and_compare(reconcile, monkeypatch, 6)


def cut_and_compare(reconcile: Reconciler, monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    seed = Random().getrandbits(32)
    random = Random(seed)
    monkeypatch.setattr(oracle, "SINCE", datetime.min.replace(tzinfo=UNTIL.tzinfo))
    all_of_it = {f"key {number}": timelines.random_timeline(random) for number in range(KEYS)}
    strays = {timelines._message_id(random, BEGIN): BEGIN + random.random() * (6 * HOUR + 2 * GRACE) for _ in range(20)}
    cuts = sorted(BEGIN + random.random() * 6 * HOUR + timedelta(minutes=1) for _ in range(count))
    for cut in cuts:
        judged(reconcile, all_of_it, strays, cut, "chain")
    chained = judged(reconcile, all_of_it, strays, WATERMARK, "chain")
    whole = judged(reconcile, all_of_it, strays, WATERMARK, "whole")
    wanted = expected(all_of_it, strays)
    assert set(wanted.values()) >= set(FAULTS) - {"LATE", "WRONG_EFFECT", "WRONG_SUM"} and {
        group for _, group in wanted
    } >= set(GROUPS)
    for name, found in (("one run", whole), ("the chain", chained)):
        differing = sorted({subject for subject, _ in set(found.items()) ^ set(wanted.items())})
        shown = [(each, found.get(each), wanted.get(each), all_of_it.get(each[0])) for each in differing[:3]]
        assert not differing, f"{name}, seed {seed}, cuts {cuts}, {len(differing)} differ: {shown}"


@pytest.mark.soak
def test_a_second_row_with_a_message_of_its_own_is_a_duplicate(reconcile: Reconciler, world: World) -> None:
    """In its window it looks as it should; no unique index excludes that its key was there before."""
    reconcile.rules(groups=())
    world.app.execute("ALTER TABLE orders_order DROP CONSTRAINT orders_order_pkey")
    world.add(Order(number=1), Order(number=2))
    assert reconcile.findings(reconcile.run()) == []
    move_boundary(reconcile, START + HOUR)
    world.add(Order(number=1, at=START + 2 * HOUR), Order(number=3, at=START + 2 * HOUR))
    assert reconcile.findings(reconcile.run()) == [("1", "", "DUPLICATE")]


def test_a_finding_about_a_row_far_ahead_stays_open_until_its_time_has_come(
    reconcile: Reconciler, world: World
) -> None:
    """Between, the row is less than an hour ahead, so a run does not judge it."""
    world.add(Order(number=1), Order(number=2))
    world.app.execute("UPDATE orders_order SET paid_at = paid_at + interval '2 hours' WHERE id = 1")
    rules = reconcile.rules(groups=("points",)).read_text()
    seen = []
    for hours in (0.5, 1.5, 3.0):
        watermark = f'watermark = "{(START + hours * HOUR).isoformat()}"'
        text = rules.replace('_APP"', f'_APP"\n{watermark}').replace('_BROKER"', f'_BROKER"\n{watermark}')
        result = reconcile.run(rules=reconcile.rules(text=text))
        seen.append((sorted(reconcile.findings(result)), result["open_subjects"]))
    ahead = [("1", "", "MISMATCH"), ("1", "points", "EARLY")]
    assert seen == [(ahead, 2), ([], 2), (ahead, 2)]
