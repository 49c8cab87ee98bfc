"""Erased messages are nowhere in the archive. Of these and of large bodies, a run judges only that they exist."""

from __future__ import annotations

import io
from datetime import UTC, datetime
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from outbox.broker.database.executor import Executor
from outbox.codec import REFERENCE_CONTENT_TYPE
from outbox.contrib.erasure import broker_rows
from outbox.contrib.erasure.broker_rows import Erasure, fingerprint
from outbox.contrib.large_bodies.reference import Reference
from spark import archive
from spark.common.errors import UsageProblem
from spark.common.progress import Progress
from spark.rules import file as rules_file
from tests.spark.conftest import Reconciler
from tests.spark.test_archive import archived_rules, take
from tests.spark.world import World

pytestmark = pytest.mark.timeout(600)
TOPIC = "order.paid"
MARK = "anna.marker@example.org"
SECRET = "of the tests"


def files_with(text: str, folder: Path) -> list[str]:
    """The archived messages that contain the text."""
    rows = (row for file in sorted(folder.rglob("*.parquet")) for row in pq.read_table(file).to_pylist())
    return [row["key"] for row in rows if any(text in str(value) for value in row.values())]


@pytest.mark.slow
def test_erased_messages_in_the_archive_and_in_a_run(reconcile: Reconciler, world: World, tmp_path: Path) -> None:
    world.add_many(6)
    large = Reference.to("outbox/2026-01-01/00/00000000-0000-7000-8000-000000000000", "application/json", b"{}")
    world.broker.execute("UPDATE commit_log SET body = %s, content_type = %s WHERE key = '6'",
                         [large.encoded(), REFERENCE_CONTENT_TYPE])  # fmt: skip
    world.app.execute("UPDATE orders_order SET total = total + 1 WHERE id = 6")
    body = f'{{"name": "{MARK}", "total": "wrong"}}'.encode()
    world.broker.execute("UPDATE commit_log SET body = %s WHERE key IN ('1', '2', '3')", [body])
    world.broker.execute("UPDATE commit_log SET headers = %s WHERE key = '2'", [f'{{"name": "{MARK}"}}'])
    world.app.execute("DELETE FROM orders_order WHERE id = 2")
    world.app.execute("UPDATE orders_order SET total = total + 1 WHERE id = 4")
    path = reconcile.rules(text=archived_rules(tmp_path))
    take(reconcile, path)
    assert len(files_with(MARK, tmp_path / "archive")) == 3, "the control: the archive has the data"
    world.broker.execute(
        "INSERT INTO timed_out (group_id, log_id, queue_id, queue_offset) "
        "SELECT %s, log_id, %s, 7 FROM commit_log WHERE key = '3'", [world.groups["points"], world.queue_id]
    )  # fmt: skip
    take(reconcile, path)
    timed_out = tmp_path / "archive" / "timed_out_v1"
    assert files_with("points", timed_out) == ["3"], "in a later pass than its message"

    # One by its id, one by its key, and one whose key is replaced too. The last one is only in the archive.
    run, now = Executor(world.broker, "outbox"), datetime.now(UTC)
    for key, replacement in (("1", None), ("2", None)):
        broker_rows.erase(run, TOPIC, broker_rows.find_keys(run, TOPIC, [key]), replacement=replacement)
    [(first,)] = world.broker.execute("SELECT message_id FROM commit_log WHERE key = '1'").fetchall()
    entries = [Erasure(kind="message", topic=TOPIC, value=str(first), reason="a test", at=now)]
    for key, replacement in (("2", None), ("3", "erased:x")):
        value = fingerprint(SECRET, TOPIC, key)
        entries.append(
            Erasure(kind="key", topic=TOPIC, value=value, replacement=replacement, reason="a test", at=now)
        )  # fmt: skip
    broker_rows.store(run, entries)
    world.broker.execute("UPDATE commit_log SET key = 'erased:x', body = '', content_type = %s WHERE key = '3'",
                         ["application/vnd.outbox.erased"])  # fmt: skip
    world.app.execute("DELETE FROM orders_order WHERE id = 3")

    work = archive.Archive(reconcile.spark, rules_file.load(path), Progress(io.StringIO()))
    with pytest.raises(UsageProblem, match="OUTBOX_ERASURE_SECRET"):
        work.erase(None)
    assert len(files_with(MARK, tmp_path / "archive")) == 3
    assert work.erase(SECRET) == 3
    assert files_with(MARK, tmp_path / "archive") == []
    assert files_with("application/vnd.outbox.erased", tmp_path / "archive").count("erased:x") == 1
    assert files_with("points", timed_out) == ["erased:x"]
    assert work.erase(SECRET) == 0

    result = reconcile.run(full=True)
    assert set(reconcile.findings(result)) == {("4", "", "MISMATCH")}, "the other message is judged as before"
    assert (result["totals"]["ERASED"], result["totals"]["OK"], result["faults"]) == (4, 1, 1)

    world.broker.execute("DROP VIEW erased_v1")
    with pytest.raises(UsageProblem, match=r"no service on it has the app outbox\.contrib\.erasure"):
        archive.Archive(reconcile.spark, rules_file.load(path), Progress(io.StringIO())).erase(SECRET)
