"""Findings for other programs: as lines of JSON, and from there as a table in Django's admin."""

from __future__ import annotations

import json
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as parquet
import pytest
from pyspark.sql import SparkSession

from spark import cli
from spark.common.errors import UsageProblem
from spark.common.store import Store
from spark.judging import causes
from spark.judging.remedies import with_remedies
from spark.output import report
from spark.stages.findings import FINDINGS_SCHEMA, causes_of
from tests.spark.conftest import Reconciler
from tests.spark.world import World

pytestmark = pytest.mark.timeout(300)

ROOT = Path(__file__).resolve().parent.parent.parent


@pytest.mark.slow
def test_lines_are_the_findings_in_force_while_they_are_there(reconcile: Reconciler, world: World) -> None:
    world.add_many(20)
    world.broker.execute("DELETE FROM commit_log WHERE key = '3'")
    world.app.execute("UPDATE orders_order SET total = total + 1 WHERE id = 8")
    result = reconcile.run()
    output = str(reconcile.folder / reconcile.output)
    lines = [json.loads(line) for line in Store(output).finding_lines()]
    assert [(line["key"], line["group"], line["class"]) for line in lines] == [("3", "", "LOST"), ("8", "", "MISMATCH")]
    assert {line["run"] for line in lines} == {result["run"]}
    assert lines[1]["at"].endswith("+00:00"), lines[1]
    assert len(list(Store(output).finding_lines(limit=1))) == 1
    folder = reconcile.folder / reconcile.output / result["findings"]
    schema = parquet.read_schema(next(folder.glob("*.parquet")))
    assert str(schema.field("at").type) == "timestamp[us, tz=UTC]", "readers other than Spark must know the zone"
    folder.rename(folder.with_name("elsewhere"))
    with pytest.raises(UsageProblem, match="cannot be read"):
        list(Store(output).finding_lines())


def test_a_mismatch_in_several_columns_has_a_cause_for_each(spark_session: SparkSession) -> None:
    both, total = ["total", "customer"], ["total"]
    one = {"rule": "<rule>", "class": "MISMATCH", "group": "", "severity": "critical", "mismatched": both}
    known = {
        **one,
        "mismatched": total,
        "acknowledged": "by ada",
        "was": "MISMATCH",
        "row_at": datetime(2025, 5, 1, tzinfo=UTC),
    }
    recovered = {**one, "class": "RECOVERED", "was": "MISMATCH"}
    frame = spark_session.createDataFrame([one, one, {**one, "mismatched": total}, known, recovered], FINDINGS_SCHEMA)
    first, second, closed = causes_of(frame)
    assert (first.subject, first.findings, first.new, first.acknowledged) == (
        "MISMATCH of rule <rule>, column total", 4, 3, 1,
    )  # fmt: skip
    assert (first.first_findings, first.first_new, first.first_acknowledged) == (4, 3, 1)
    assert (second.detail, second.findings, second.new) == ("customer", 2, 2)
    assert (second.first_findings, second.first_new) == (0, 0), "the totals have each finding once"
    assert first.oldest == "2025-05-01T00:00:00Z" and second.oldest is None
    assert (closed.finding_class, closed.first_findings, closed.new) == ("RECOVERED", 1, 0)
    read = {"rule": "<rule>", "class": "MISMATCH", "group": "", "delivery": None, "mismatched": both}
    assert causes.ids_of(read) == [first.id, second.id]
    assert causes.ids_of({**read, "mismatched": None}) == [causes.id_of("<rule>", "MISMATCH", "", "")]


def test_a_lost_row_on_which_groups_have_acted_is_not_published_again(spark_session: SparkSession) -> None:
    """It is a cause of its own, and comes after the rows that a repair can publish."""
    shared = {"rule": "orders", "group": "", "severity": "critical"}
    found = [
        {**shared, "class": "LATE", "key": "1"},
        {**shared, "class": "LOST", "key": "2", "effects": 2},
        {**shared, "class": "LOST", "key": "3", "effects": 0},
        {**shared, "class": "LOST", "key": "4", "effects": 0, "acknowledged": "by ada"},
        {**shared, "class": "RECOVERED", "key": "5", "was": "LOST"},
        {**shared, "class": "ORPHAN", "key": "6", "effects": 1, "severity": "warning"},
    ]
    frame = spark_session.createDataFrame(found, FINDINGS_SCHEMA).drop("remedy")
    ordered = with_remedies(frame).coalesce(1).sortWithinPartitions(*causes.order())
    rows = {row["key"]: row.asDict() for row in ordered.collect()}
    assert list(rows) == ["3", "2", "1", "6", "4", "5"]
    assert "do not publish the row again" in rows["2"]["remedy"] and "outbox_repair" in rows["3"]["remedy"]
    assert "outbox_repair" not in rows["2"]["remedy"]
    first, *_, last = [each for each in causes_of(frame) if each.finding_class == "LOST"]
    assert (first.subject, first.findings) == ("LOST of rule orders", 2)
    assert (last.subject, last.findings) == ("LOST of rule orders, with effects", 1)
    assert "groups have acted on its key" in last.meaning
    assert causes.ids_of(rows["2"]) == [last.id] and causes.ids_of(rows["3"]) == [first.id]


def test_the_page_shows_a_finding_that_is_acknowledged_after_all_others(spark_session: SparkSession) -> None:
    """The remedy and the commands of a cause have the ids of the first finding."""
    listed = [{"key": "1", "class": "DEAD", "acknowledged": "by ada"}, {"key": "2", "class": "DEAD"}]
    assert [row["key"] for row in report.samples(spark_session.createDataFrame(listed, FINDINGS_SCHEMA), 1)] == ["2"]


def test_no_result_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UsageProblem, match="there is no result in"):
        list(Store(str(tmp_path)).finding_lines())


def test_the_findings_of_one_cause(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A mismatch in two columns is a finding of two causes; an old cause is refused, not printed as no finding."""
    shared = {"rule": "orders", "group": "", "delivery": None}
    listed = [
        {**shared, "key": "1", "class": "LOST", "mismatched": None},
        {**shared, "key": "2", "class": "MISMATCH", "mismatched": ["total", "customer"]},
        {**shared, "key": "3", "class": "MISMATCH", "mismatched": ["customer"]},
        {**shared, "key": "4", "class": "UNDELIVERED", "group": "points", "delivery": "passed", "mismatched": None},
    ]
    known = {
        text: causes.id_of("orders", *text.split("/"))
        for text in ("LOST//", "MISMATCH//total", "MISMATCH//customer", "UNDELIVERED/points/passed")
    }
    folder = tmp_path / "runs" / "r1" / "findings"
    folder.mkdir(parents=True)
    parquet.write_table(pa.Table.from_pylist(listed), folder / "part-0.parquet")
    result = {
        "version": 1,
        "run": "r1",
        "findings": "runs/r1/findings",
        "causes": [{"id": id_} for id_ in known.values()],
    }
    (tmp_path / "result.json").write_text(json.dumps(result))
    keys = {}
    for text, id_ in known.items():
        assert cli.main(["findings", "--output", str(tmp_path), "--cause", id_]) == 0
        keys[text] = [json.loads(line)["key"] for line in capsys.readouterr().out.splitlines()]
    assert list(keys.values()) == [["1"], ["2"], ["2", "3"], ["4"]], keys
    assert cli.main(["findings", "--output", str(tmp_path), "--cause", "0badcafe"]) == 2
    assert "has no cause '0badcafe': a later run may have replaced" in capsys.readouterr().err


def test_a_reader_that_closes_the_pipe_ends_the_command_quietly(tmp_path: Path) -> None:
    """As `outbox-reconcile findings | head -1` does."""
    store = Store(str(tmp_path))
    store.write_table("found/part-0.parquet", pa.table({"key": [str(number) for number in range(50_000)]}))
    store.write("result.json", json.dumps({"version": 1, "run": "one", "findings": "found"}))
    command = [sys.executable, "-m", "spark", "findings", "--output", str(tmp_path)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stderr is not None
        assert json.loads(process.stdout.readline())["key"] == "0"
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 141, "as of a program that SIGPIPE ends"
