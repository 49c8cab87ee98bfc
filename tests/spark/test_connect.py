"""A run over Spark Connect: the process of the run has no Java, and a real server has no code of outbox."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pyspark
import pytest

from tests.servers import free_ports
from tests.spark.test_processes import ROOT
from tests.spark.world import Order, World, write_rules
from tests.support import eventually

pytestmark = [pytest.mark.soak, pytest.mark.timeout(900)]
pytest.importorskip("grpc_status", reason="Spark Connect needs pip install 'pyspark[connect]'")


@contextmanager
def server(folder: Path) -> Iterator[str]:
    """The URL of a Spark Connect server in a process of its own, in which the checkout is not known."""
    (port,) = free_ports(1)
    home = Path(pyspark.__file__).parent
    ours = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "SPARK", "PYSPARK"))}
    variables = {**ours, "SPARK_HOME": str(home), "SPARK_LOCAL_IP": "127.0.0.1", "PYSPARK_PYTHON": sys.executable}
    settings = {
        "spark.connect.grpc.binding.port": str(port),
        "spark.connect.grpc.binding.address": "127.0.0.1",
        "spark.ui.enabled": "false",
        "spark.sql.shuffle.partitions": "2",
        "spark.sql.codegen.wholeStage": "false",
        "spark.sql.adaptive.enabled": "false",
        "spark.driver.memory": "1g",
        "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
    }
    options = [part for name, value in settings.items() for part in ("--conf", f"{name}={value}")]
    named = ["--class", "org.apache.spark.sql.connect.service.SparkConnectServer"]
    command = [str(home / "bin" / "spark-submit"), "--master", "local[1]", *named, *options, "spark-internal"]
    with (folder / "connect.log").open("wb") as log:
        process = subprocess.Popen(command, cwd=folder, env=variables, stdout=log, stderr=log)
    try:
        eventually(lambda: _answers(port), within_seconds=300, what="the Spark Connect server")
        yield f"sc://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(60)


def _answers(port: int) -> bool:
    with closing(socket.socket()) as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def test_a_run_over_spark_connect(world: World, tmp_path: Path) -> None:
    write_rules(tmp_path, groups=())
    world.add(*(Order(number=number) for number in (1, 2, 3)))
    world.app.execute("UPDATE orders_order SET total = 1 WHERE id = 2")
    elsewhere = tmp_path / "server"
    elsewhere.mkdir()
    with server(elsewhere) as url:
        arguments = ["run", "--rules", str(tmp_path / "reconcile.toml"), "--output", str(tmp_path / "out"), "--json"]
        done = subprocess.run(
            [sys.executable, "-m", "spark", *arguments, "--remote", url],
            cwd=ROOT,
            env={**os.environ, **world.environment, "JAVA_HOME": "/nowhere"},
            capture_output=True,
            text=True,
            check=False,
        )
    assert done.returncode == 1, done.stderr[-3000:]
    assert {name: count for name, count in json.loads(done.stdout)["totals"].items() if count} == {
        "MISMATCH": 1,
        "OK": 2,
    }
