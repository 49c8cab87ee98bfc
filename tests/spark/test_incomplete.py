"""Which runs are incomplete: those over damaged files. Quiet topics and exports without some views are no reason."""

from __future__ import annotations

from datetime import timedelta
from random import Random

import pytest

from spark.common.errors import RunIncomplete, causes
from tests.spark import timelines
from tests.spark.conftest import Reconciler
from tests.spark.oracle import UNTIL, BusinessRow, Sent
from tests.spark.test_incremental import RULES
from tests.spark.timelines import Fact, Timeline
from tests.spark.world import Order, World

pytestmark = pytest.mark.timeout(300)
AT = UNTIL - timedelta(hours=1)
JVM = """An error occurred while calling o1.parquet.
: org.apache.spark.SparkException: Job aborted.
\tat org.apache.spark.sql.Files$.write(Files.scala:1)
\tat java.base/java.lang.Thread.run(Thread.java:1)
Caused by: org.apache.spark.SparkException: [FAILED_READ_FILE.NO_HINT] Encountered error while reading file:///a/b.parquet.
\tat org.apache.spark.sql.Reader.next(Reader.scala:1)
\t... 12 more
Caused by: java.lang.RuntimeException: file:///a/b.parquet is not a Parquet file. Expected magic number at tail.
\t... 13 more
"""


def test_the_whole_cause_of_a_jvm_error_in_one_line() -> None:
    said = causes(JVM)
    assert said.endswith(
        "java.lang.RuntimeException: file:///a/b.parquet is not a Parquet file. Expected magic number at tail"
    )
    assert "[FAILED_READ_FILE.NO_HINT] Encountered error while reading file:///a/b.parquet.; " in said
    assert "\tat " not in said and "more" not in said and "\n" not in said
    long = "x" * 1_000
    assert causes(f"Job aborted.\n\tat a.b(c)\nCaused by: {long}") == f"Job aborted.; {long}"


@pytest.mark.slow
def test_a_topic_that_retention_has_emptied_is_quiet_not_incomplete(reconcile: Reconciler, world: World) -> None:
    """No order for longer than the topic keeps its messages."""
    reconcile.rules(groups=())
    world.pay(Order(number=1))
    world.broker.execute("INSERT INTO pruned (topic_id, sent, pruned_at) VALUES (%s, 1, now())", [world.topic_id])
    result = reconcile.run()
    assert (result["status"], reconcile.findings(result), result["rules"][0]["rows_read"]) == ("clean", [], 0)


@pytest.mark.soak
def test_exports_without_some_views_and_one_that_is_damaged(reconcile: Reconciler) -> None:
    """Views that only add to a finding are not needed; a damaged file is named, with the remedy."""
    fact = Fact(sent=Sent(stored_at=AT), message_id=timelines._message_id(Random(1), AT), handled=(AT,))
    whole = {
        "1": Timeline(rows=(BusinessRow(at=AT),), facts=(fact,), effects=(AT,)),
        "2": Timeline(rows=(BusinessRow(at=AT),)),
    }
    folder = reconcile.folder / "exports"
    folder.mkdir()
    timelines.export(whole, {}, UNTIL, folder)
    for view in ("dead_letter_v1", "delivery_v1"):
        (folder / f"{view}.parquet").unlink()
    reconcile.rules(text=RULES.format(folder=folder, watermark=UNTIL.isoformat()))
    result = reconcile.run()
    assert reconcile.findings(result) == [("2", "", "LOST")]
    assert "a dead letter is reported as UNDELIVERED, not as DEAD" in result["rules"][0]["notes"][0]
    inbox = folder / "inbox.parquet"
    inbox.write_bytes(inbox.read_bytes()[:-5] + b"xxxxx")
    with pytest.raises(RunIncomplete, match=r"inbox\.parquet.*previous result stays in force.*export the file"):
        reconcile.run(full=True)
