"""Suspects whose rows and bodies are together far larger than Spark's memory."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from tests.spark.test_processes import ROOT, SMALL, environment
from tests.spark.world import World, write_rules

pytestmark = pytest.mark.timeout(1800)
MEBIBYTE = 1024 * 1024


@pytest.mark.soak
@pytest.mark.parametrize("mask", ["", 'mask = ["customer"]'])
def test_wide_suspects_fit_a_small_memory(world: World, tmp_path: Path, mask: str) -> None:
    """768 MiB of bodies, each 4 MiB wide, and rows a quarter as wide, in 512 MiB of Java."""
    plant(world, 192, 4 * MEBIBYTE)
    write_rules(tmp_path, groups=(), extra=mask)
    done = run(world, tmp_path, "512m")
    assert done.returncode == 1, done.stderr
    assert json.loads(done.stdout)["totals"]["MISMATCH"] == 192
    assert widest(tmp_path) < 100_000, "what a finding shows is bounded"


@pytest.mark.soak
def test_columns_of_100_megabytes_fit_three_gigabytes(world: World, tmp_path: Path) -> None:
    """Rows whose compared column is 100 MiB wide differ from their messages: the second look reads them whole."""
    world.add_many(20)
    world.app.execute("UPDATE orders_order SET customer = repeat('x', %s) WHERE id <= 6", [100 * MEBIBYTE])
    write_rules(tmp_path, groups=())
    done = run(world, tmp_path, "3g")
    assert done.returncode == 1, done.stderr
    assert json.loads(done.stdout)["totals"]["MISMATCH"] == 6
    assert widest(tmp_path) < 100_000, "what a finding shows is bounded"


def plant(world: World, count: int, width: int) -> None:
    """Rows that differ from their messages by the end of a long text."""
    world.add_many(count)
    world.app.execute("UPDATE orders_order SET customer = repeat('x', %s) || 'row'", [width // 4])
    world.broker.execute(
        "UPDATE commit_log SET body = convert_to(jsonb_build_object('order_id', key, 'customer', "
        "repeat('x', %s) || 'body', 'total', convert_from(body, 'UTF8')::jsonb -> 'total', 'paid_at', "
        "convert_from(body, 'UTF8')::jsonb -> 'paid_at', 'more', repeat('y', %s))::text, 'UTF8')",
        [width // 4, width // 4 * 3],
    )


def run(world: World, folder: Path, memory: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "spark", "run", "--json", "--rules", str(folder / "reconcile.toml")]
    pairs = [setting for place, setting in enumerate(SMALL) if "memory" not in setting and setting != "--conf"]
    settings = [*pairs[:2], *(part for pair in pairs[2:] for part in ("--conf", pair))]
    memory_settings = ["--conf", f"spark.driver.memory={memory}"]
    return subprocess.run(
        [*command, "--output", str(folder / "out"), *settings, *memory_settings],
        cwd=ROOT,
        env=environment(world),
        capture_output=True,
        text=True,
        check=False,
    )


def widest(folder: Path) -> int:
    result: dict[str, Any] = json.loads((folder / "out" / "result.json").read_text())
    rows = pq.read_table(folder / "out" / result["findings"]).to_pylist()
    return max(len(str(row)) for row in rows)
