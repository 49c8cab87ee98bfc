"""An output folder by URL: Spark (S3A) and the process of the run (Arrow) write into one local S3 server."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from spark.common.store import Store
from tests.spark import object_store
from tests.spark.test_processes import ROOT, SMALL, environment
from tests.spark.world import Order, World, write_rules

pytestmark = [pytest.mark.slow, pytest.mark.lake, pytest.mark.timeout(900)]


def test_runs_into_a_bucket(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    jars = object_store.jars()
    write_rules(tmp_path, groups=())
    world.add(*(Order(number=number) for number in (1, 2, 3)))
    world.app.execute("UPDATE orders_order SET total = 1 WHERE id = 2")
    output = f"s3a://{object_store.BUCKET}/shop/out"
    with object_store.running(tmp_path) as variables:
        settings = {
            "spark.jars": jars,
            "spark.hadoop.fs.s3a.endpoint": variables["AWS_ENDPOINT_URL"],
            "spark.hadoop.fs.s3a.path.style.access": "true",
        }
        first = run(world, tmp_path, output, variables, settings)
        assert (first["totals"]["MISMATCH"], first["totals"]["OK"]) == (1, 2)
        world.app.execute("UPDATE orders_order SET total = 12.50 WHERE id = 2")
        second = run(world, tmp_path, output, variables, settings)
        assert (second["totals"]["RECOVERED"], second["faults"]) == (1, 0)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        store = Store(output)
        # Commands without Spark read the same folder.
        assert [json.loads(line)["class"] for line in store.finding_lines()] == ["RECOVERED"]
        assert len(store.folders("runs")) == 2
        assert store.files("locks") == []
    assert not (tmp_path / "s3a:").exists()


def run(
    world: World, folder: Path, output: str, variables: Mapping[str, str], settings: Mapping[str, str]
) -> dict[str, Any]:
    """The result of a run as a process."""
    options = [part for name, value in settings.items() for part in ("--conf", f"{name}={value}")]
    command = [sys.executable, "-m", "spark", "run", "--rules", str(folder / "reconcile.toml"), "--output", output]
    done = subprocess.run(
        [*command, "--json", *SMALL, *options],
        cwd=ROOT,
        env=environment(world, **variables),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode in (0, 1), done.stderr[-3000:]
    result: dict[str, Any] = json.loads(done.stdout)
    return result
