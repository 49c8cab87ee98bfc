"""A continuous reconciliation gives the findings of one run, wherever its batches end and in whatever way it ends."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from random import Random
from typing import Any

import pytest

from spark.common.errors import RunIncomplete, UsageProblem
from spark.rules.rule import FAULTS
from spark.watch import CHECKPOINT, Watch, _stream_failure
from tests.spark import oracle, timelines
from tests.spark import world as world_rules
from tests.spark.conftest import Reconciler
from tests.spark.oracle import GRACE, UNTIL, WATERMARK
from tests.spark.test_history import rows
from tests.spark.test_incremental import RULES, Found, expected
from tests.spark.test_processes import KILLS, ROOT, SMALL, environment, finished, judged, kill_at
from tests.spark.test_processes import start as start_run
from tests.spark.timelines import BEGIN, HOUR, Timeline
from tests.spark.world import Order, World

pytestmark = pytest.mark.timeout(900)
KEYS = 500


def streamed(
    reconcile: Reconciler, all_of_it: dict[str, Timeline], strays: dict[str, datetime], watermark: datetime
) -> Found:
    """The findings of a continuous reconciliation that is started, judges the rows up to a moment, and ends."""
    folder = reconcile.folder / "exports"
    folder.mkdir(exist_ok=True)
    timelines.export(all_of_it, strays, watermark, folder)
    path = reconcile.rules(text=RULES.format(folder=folder, watermark=watermark.isoformat()))
    rows = reconcile.rows(reconcile.watch(path).available_now())
    return {(row["key"], row["group"]): row["class"] for row in rows if row["class"] in FAULTS}


@pytest.mark.soak
def test_a_stream_gives_the_verdicts_of_one_run(reconcile: Reconciler, monkeypatch: pytest.MonkeyPatch) -> None:
    """Random histories, streamed in batches that end at random moments, each started from the checkpoint.

    One run gives what the oracle says (test_incremental.py).
    """
    stream_in_batches(reconcile, monkeypatch, 2)


@pytest.mark.soak
def test_a_stream_of_many_batches_gives_the_verdicts_of_one_run(
    reconcile: Reconciler, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream_in_batches(reconcile, monkeypatch, 8)


def stream_in_batches(reconcile: Reconciler, monkeypatch: pytest.MonkeyPatch, batches: int) -> None:
    seed = Random().getrandbits(32)
    random = Random(seed)
    monkeypatch.setattr(oracle, "SINCE", datetime.min.replace(tzinfo=UNTIL.tzinfo))
    all_of_it = {f"key {number}": timelines.random_timeline(random) for number in range(KEYS)}
    strays = {timelines._message_id(random, BEGIN): BEGIN + random.random() * (6 * HOUR + 2 * GRACE) for _ in range(9)}
    cuts = sorted(BEGIN + random.random() * 6 * HOUR + timedelta(minutes=1) for _ in range(batches - 1))
    reconcile.output = "stream"
    for cut in cuts:
        streamed(reconcile, all_of_it, strays, cut)
    continuous = streamed(reconcile, all_of_it, strays, WATERMARK)
    assert in_force(reconcile)["batch"]["number"] == batches - 1, "one query, which went on from its checkpoint"
    assert continuous == expected(all_of_it, strays), f"seed {seed}, cuts {cuts}"


def in_force(reconcile: Reconciler) -> dict[str, Any]:
    """result.json, {} as long as there is none."""
    path = reconcile.folder / reconcile.output / "result.json"
    result: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    return result


def until(watched: Watch, query: Any, condition: Callable[[], bool]) -> None:
    """Let the query run until a condition holds; raises the error that ends it before."""
    while not condition():
        assert not watched.wait(query, 1), "the query ended by itself"


@pytest.mark.soak
def test_batches_at_intervals_find_what_is_planted_between_them(reconcile: Reconciler, world: World) -> None:
    """The same findings as one run over everything; a later batch judges the rows that a batch could not judge."""
    quick = world_rules.RULES.replace('"30s"', '"5s"').replace('"15m"', '"5s"')
    reconcile.rules(text=quick.format(extra="", groups=world_rules.group_rules(["logistics"])))
    world.pay(Order(number=1, at=datetime.now(UTC)))
    watched = reconcile.watch()
    query = watched.every("0 seconds")
    try:
        # A broker without any message: nothing to compare, which is no verdict, and no end either.
        until(watched, query, lambda: "the broker has no message" in reconcile.said.getvalue())
        assert in_force(reconcile) == {}
        world.add(*(Order(number=number, at=datetime.now(UTC)) for number in range(10, 20)))
        until(watched, query, lambda: in_force(reconcile).get("totals", {}).get("LOST") == 1)
        world.send(Order(number=30, at=datetime.now(UTC)))
        stuck = Order(number=31, at=datetime.now(UTC))
        world.pay(stuck)
        world.send(stuck, decision=None)
        different = Order(number=40, at=datetime.now(UTC))
        world.pay(different)
        world.send(different, body=different.body.replace(b"12.50", b"12.51"))
        world.handle(different)
        wanted = [("1", "", "LOST"), ("30", "", "ORPHAN"), ("31", "", "HALF_STUCK"), ("40", "", "MISMATCH")]
        until(watched, query, lambda: in_force(reconcile)["faults"] == len(wanted))
    finally:
        query.stop()
    assert sorted(reconcile.findings(in_force(reconcile))) == wanted
    reconcile.output = "batch"
    assert sorted(reconcile.findings(reconcile.run())) == wanted


@pytest.mark.slow
def test_a_batch_that_is_given_again_is_judged_once(reconcile: Reconciler, world: World) -> None:
    """Killed after its result was published and before Spark had noted that the batch is done.

    And nothing later than the start of a batch is judged by it.
    """
    world.add(Order(number=1))
    world.pay(Order(number=2))
    reconcile.rules()
    first = reconcile.watch().available_now()
    assert (first["batch"]["number"], first["new_faults"]) == (0, 1)
    (start,) = re.findall("batch 0: up to (.*)", reconcile.said.getvalue())
    assert datetime.fromisoformat(first["rules"][0]["watermark"]) <= datetime.fromisoformat(start)
    commits = reconcile.folder / reconcile.output / CHECKPOINT / "commits"
    for each in commits.iterdir():
        each.unlink()
    again = reconcile.watch().available_now()
    assert "batch 0: its result is in force already" in reconcile.said.getvalue()
    assert (again["batch"]["number"], again["new_faults"], again["faults"]) == (1, 0, 1)


@pytest.mark.slow
def test_a_problem_of_the_rules_or_of_the_source_is_told_as_by_run(reconcile: Reconciler, world: World) -> None:
    world.pay(Order(number=1))
    reconcile.rules()
    with pytest.raises(RunIncomplete, match="the broker has no message"):
        reconcile.watch().available_now()
    world.app.execute("ALTER TABLE orders_order RENAME COLUMN total TO sum")
    watched = reconcile.watch()
    with pytest.raises(UsageProblem, match="total"):
        watched.wait(watched.every("0 seconds"), 120)


def start(world: World, folder: Path, *how: str) -> subprocess.Popen[str]:
    """The command as a process that leads a group of its own, with its JVM in it."""
    command = [sys.executable, "-m", "spark", "watch", *how, "--rules", str(folder / "reconcile.toml")]
    return subprocess.Popen(
        [*command, "--output", str(folder / "out"), *SMALL],
        cwd=ROOT,
        env=environment(world),
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def test_what_ended_the_stream_is_told_whole() -> None:
    cause = "Python worker failed to connect back, " + "because " * 100
    told = str(_stream_failure(Exception(f"[STREAM_FAILED] {cause}\n=== Streaming Query ===\nIdentifier: x")))
    assert cause.strip() in told and "Identifier" not in told


@pytest.mark.soak
def test_sigterm_ends_batches_at_intervals_and_the_next_start_goes_on(reconcile: Reconciler, world: World) -> None:
    """It ends with 0, as systemd expects; the next start judges the rows of a batch that was under way."""
    reconcile.rules(groups=())
    world.add(*(Order(number=number) for number in range(1, 6)))
    world.pay(Order(number=500))
    with start(world, reconcile.folder, "--every", "0") as process:
        assert process.stderr is not None
        said = until_said(process, "batch 1: up to")
        process.terminate()
        _, rest = process.communicate()
    assert process.returncode == 0, said + rest
    assert "stopping: the running batch ends without a result" in rest
    assert not left_of(process.pid), "its JVM ended with it"
    first = in_force(reconcile)
    assert first["totals"]["LOST"] == 1
    world.send(Order(number=500))
    again = reconcile.watch().available_now()
    assert again["batch"]["number"] > first["batch"]["number"], "it went on from the checkpoint"
    assert (again["totals"]["RECOVERED"], again["faults"]) == (1, 0)


def until_said(process: subprocess.Popen[str], text: str) -> str:
    """The output of the process up to a line with `text`."""
    assert process.stderr is not None
    said: list[str] = []
    for line in process.stderr:
        said.append(line)
        if text in line:
            return "".join(said)
    raise AssertionError("".join(said))


def left_of(session: int) -> list[str]:
    """Processes of the session that still run; one that has ended may still wait for its parent to reap it."""
    listed = ["ps", "-o", "stat=,pid=,args=", "-s", str(session)]
    found = subprocess.run(listed, capture_output=True, text=True, check=False)
    return [line for line in found.stdout.splitlines() if not line.startswith("Z")]


@pytest.mark.soak
@pytest.mark.timeout(2400)
@pytest.mark.parametrize("stage", ["snapshot", "scan", "confirm", "write", "publish"])
def test_kill_9_five_times_in_a_window_then_on_from_the_checkpoint(world: World, tmp_path: Path, stage: str) -> None:
    """Within the batch, and as its result is published: each finding is found once, as by a run that was not killed."""
    world_rules.write_rules(tmp_path, groups=("logistics",))
    world.add(*(Order(number=number) for number in range(1, 6)))
    world.pay(Order(number=500))
    in_force = tmp_path / "out" / "result.json"
    for _ in range(KILLS):
        assert kill_at(start(world, tmp_path, "--available-now"), stage), stage
        assert stage == "publish" or not in_force.exists(), "only the last stage puts a result in force"
    offsets = tmp_path / "out" / CHECKPOINT / "offsets"
    if not in_force.exists():
        assert [path.name for path in offsets.glob("[0-9]*")] == ["0"], "the window that was cut is in the checkpoint"
    with start(world, tmp_path, "--available-now") as process:
        verdict, said = process.communicate()
    assert (process.returncode, "\nfindings: 1 LOST" in verdict) == (1, True), verdict + said
    result = json.loads(in_force.read_text())
    assert (result["totals"]["LOST"], result["faults"]) == (1, 1)
    told = [(row["event"], row["key"], row["class"]) for row in rows(tmp_path / "out", "findings")]
    assert told == [("FOUND", "500", "LOST")]
    killed = judged(tmp_path / "out")
    finished(start_run(world, tmp_path, "--json", "--output", str(tmp_path / "unkilled")))
    assert killed == judged(tmp_path / "unkilled")
