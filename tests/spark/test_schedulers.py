"""How data teams run it: the examples of the documentation, executed as their schedulers would."""

from __future__ import annotations

import fcntl
import importlib.util
import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.spark.test_processes import SMALL, environment
from tests.spark.world import START, Order, World, write_rules

pytestmark = pytest.mark.timeout(600)

EXAMPLES = Path(__file__).resolve().parent.parent.parent / "docs" / "examples"
DAG = EXAMPLES / "outbox_reconcile_dag.py"
# Airflow's pins are its own: it may live in another environment, whose Python this names.
AIRFLOW = os.environ.get("AIRFLOW_PYTHON") or (sys.executable if importlib.util.find_spec("airflow") else "")
# Run by Airflow's Python in the folder of the DAG; the last line is the result.
RUN_DAG = """
import json, runpy
from datetime import UTC, datetime
from pathlib import Path

named = runpy.run_path("outbox_reconcile_dag.py")
run = named["reconciliation"].test(logical_date=datetime(2025, 6, 2, tzinfo=UTC))
tasks = run.get_task_instances()
states = {task.task_id: str(task.state) for task in tasks}
passed = {task.task_id: task.xcom_pull(task_ids=task.task_id) for task in tasks}
Path("came.json").write_text(json.dumps([states, passed["reconcile"]]))
"""


@pytest.mark.soak
@pytest.mark.parametrize("number", [0, 1])
def test_the_crontab_reports_what_is_not_clean(world: World, tmp_path: Path, number: int) -> None:
    """sh runs each of its lines with cron's environment: HOME and the crontab's own variables only."""
    write_rules(tmp_path, groups=())
    world.add_many(5)
    world.app.execute("DELETE FROM orders_order WHERE id = 3")
    variables, commands = crontab(tmp_path)
    values = {name: value for name, value in environment(world).items() if name.startswith(("RECONCILE_", "J", "SP"))}
    exports = "".join(f"export {name}={shlex.quote(value)}\n" for name, value in values.items())
    (tmp_path / "reconcile.env").write_text(exports)
    (tmp_path / "node_exporter").mkdir()
    small = commands[number].replace(" --quiet", f" --quiet {shlex.join(SMALL)}")
    done = subprocess.run(
        ["/bin/sh", "-c", small],
        env={"HOME": str(tmp_path), **variables},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stderr == ""
    # Cron mails this output: the verdict, and the place of the report.
    assert done.stdout == f"findings: 1 ORPHAN, 4 OK. Report: {tmp_path}/reconcile/report.html\n"
    assert json.loads((tmp_path / "reconcile" / "result.json").read_text())["faults"] == 1
    assert (tmp_path / "node_exporter" / "outbox_reconcile_reconcile.prom").exists()


def test_a_line_that_finds_the_lock_taken_leaves_the_log_of_the_run(tmp_path: Path) -> None:
    """Each line opens the log under the lock: the first ends without a word, the nightly one waits."""
    variables, commands = crontab(tmp_path)
    (tmp_path / "reconcile.env").touch()
    command = tmp_path / "bin" / "outbox-reconcile"
    command.parent.mkdir()
    command.write_text("#!/bin/sh\necho findings\nexit 1\n")
    command.chmod(0o755)
    given: Any = {
        "env": {**variables, "PATH": f"{command.parent}:/usr/bin:/bin"},
        "stdout": subprocess.PIPE,
        "text": True,
    }
    log = tmp_path / "reconcile.log"
    log.write_text("of the run under way\n")
    with (tmp_path / "reconcile.lock").open("a") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        done = subprocess.run(["/bin/sh", "-c", commands[0]], check=False, **given)
        nightly = subprocess.Popen(["/bin/sh", "-c", commands[1]], **given)
        with pytest.raises(subprocess.TimeoutExpired):
            nightly.wait(0.5)
        assert (done.stdout, log.read_text()) == ("", "of the run under way\n")
    assert (nightly.communicate()[0], log.read_text()) == ("findings\n", "findings\n")


def crontab(folder: Path) -> tuple[Mapping[str, str], list[str]]:
    """The example's variables and commands, in `folder` instead of the system's folders."""
    text = (EXAMPLES / "outbox-reconcile.crontab").read_text()
    text = text.replace("/opt/outbox/bin", str(Path(sys.executable).parent))
    text = text.replace("/etc/outbox", str(folder)).replace("/var/lib", str(folder))
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    variables = dict(line.split("=", 1) for line in lines[:-2])
    often, nightly = (line.split(None, 5) for line in lines[-2:])
    assert (often[:5], nightly[:5]) == (["*/10", "*", "*", "*", "*"], ["30", "3", "*", "*", "*"])
    assert "%" not in often[5] + nightly[5], "cron would cut the command there"
    return variables, [often[5], nightly[5]]


@pytest.mark.skipif(not AIRFLOW, reason="Airflow is not installed (pip install apache-airflow, or AIRFLOW_PYTHON)")
@pytest.mark.parametrize("lost", [False, True])
def test_the_dag_judges_a_day_and_fails_by_its_findings(world: World, tmp_path: Path, lost: bool) -> None:
    """Executed by Airflow's own `dag.test()`: the states of the tasks, and the values in XCom."""
    write_rules(tmp_path, groups=())
    world.add_many(5)
    if lost:
        world.broker.execute("DELETE FROM commit_log WHERE key = '3'")
    # Of the next day: the interval is over.
    world.add(Order(number=90, at=START.replace(day=3)))
    states, passed, said = run_dag(world, tmp_path)
    assert states == {"reconcile": "success", "judge": "failed" if lost else "success"}, said[-3000:]
    assert {name: count for name, count in passed["totals"].items() if count} == (
        {"OK": 4, "LOST": 1} if lost else {"OK": 5}
    )
    assert passed["status"] == ("findings" if lost else "clean")
    assert (Path(passed["output"]) / passed["report"]).exists()


def run_dag(world: World, folder: Path) -> tuple[dict[str, str], dict[str, Any], str]:
    """The state of each task, what `reconcile` passed on, and the log; the DAG lies in a DAG folder of its own."""
    dags = folder / "dags"
    dags.mkdir()
    shutil.copy(DAG, dags)
    variables = environment(
        world,
        AIRFLOW_HOME=str(folder / "airflow"),
        AIRFLOW__CORE__DAGS_FOLDER=str(dags),
        AIRFLOW__CORE__LOAD_EXAMPLES="False",
        RECONCILE_RULES=str(folder / "reconcile.toml"),
        RECONCILE_OUTPUT=str(folder / "out"),
        RECONCILE_OPTIONS=shlex.join(SMALL),
        # Where outbox-reconcile is.
        PATH=f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    )
    for arguments in (["-m", "airflow", "db", "migrate"], ["-c", RUN_DAG]):
        done = subprocess.run(
            [AIRFLOW, *arguments], cwd=dags, env=variables, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    states, passed = json.loads((dags / "came.json").read_text())
    return states, passed, done.stdout + done.stderr
