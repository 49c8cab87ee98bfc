"""Tables of Delta Lake and Iceberg as sources, read by the real packages."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.spark import lake
from tests.spark.exports import export_parquet
from tests.spark.test_processes import ROOT
from tests.spark.world import Order, World

pytestmark = [pytest.mark.soak, pytest.mark.lake, pytest.mark.timeout(1800)]

FORMS = ("delta", "iceberg", "catalog")


@pytest.fixture
def seen(world: World, tmp_path: Path) -> dict[str, Any]:
    """What a process with both formats saw: three orders, of which the second differs from its message."""
    world.add(*(Order(number=number) for number in (1, 2, 3)))
    world.app.execute("UPDATE orders_order SET total = 1 WHERE id = 2")
    for connection, name in ((world.app, "orders_order"), (world.broker, "message_v1")):
        export_parquet(connection, name, tmp_path / f"{name}.parquet")
    path = os.pathsep.join((lake.python_path(), str(ROOT)))
    environment = {**os.environ, "PYTHONPATH": path, "SPARK_LOCAL_IP": "127.0.0.1"}
    command = [sys.executable, "-m", "tests.spark.lake_process", str(tmp_path), lake.jars()]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    said = [line for line in done.stderr.splitlines() if not line.startswith(("\tat ", "\t\tat "))]
    assert done.returncode == 0, "\n".join(said)[-3000:]
    result: dict[str, Any] = json.loads((tmp_path / "seen.json").read_text())
    return result


def test_delta_and_iceberg_as_sources(seen: dict[str, Any]) -> None:
    """One process checks everything, because its start takes longer than its steps."""
    for form in FORMS:
        first = seen["forms"][form]["first"]
        assert first["totals"] == {"MISMATCH": 1, "OK": 2}
        # The result names the version of each table that the run read.
        assert first["snapshots"][0].startswith("orders_order version ")
        # Rows that another job adds while a source is open belong to the next snapshot.
        assert seen["pinned"][form] == [3, 3, 4]
    for form in ("delta", "iceberg"):
        found = seen["forms"][form]
        assert found["second"]["totals"] == {"OK": 3, "RECOVERED": 1}
        assert found["second"]["snapshots"][0] != found["first"]["snapshots"][0]
    refusals(seen["refusals"])
    assert any("'recent' is neither a table of Delta Lake nor of Iceberg" in note for note in seen["view"])
    assert seen["without files"].startswith("3: ")
    assert "the previous result stays in force" in seen["without files"]


def refusals(said: dict[str, str]) -> None:
    assert all(text.startswith("2: ") for text in said.values()), said
    assert "is a table of Delta Lake" in said["delta as parquet"]
    assert "kind = 'delta'" in said["delta as parquet"]
    assert "is a table of Apache Iceberg" in said["iceberg as parquet"]
    assert "kind = 'iceberg'" in said["iceberg as parquet"]
    assert "nowhere/orders_order is no table of kind 'delta'" in said["missing"]
    assert "Give the settings of your format with --conf" in said["no catalog"]
