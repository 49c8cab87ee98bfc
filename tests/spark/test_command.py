"""`manage.py outbox_reconcile`: it starts the process with the project's own databases and ends with its exit code."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.spark.world import write_rules

ROOT = Path(__file__).resolve().parent.parent.parent


@pytest.fixture(autouse=True)
def server_of_the_run(sample_environment: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the sample starts a server of its own in the checkout, and no test stops it."""
    for name, value in sample_environment.items():
        monkeypatch.setenv(name, value)


def manage(*arguments: str) -> subprocess.CompletedProcess[str]:
    variables = {name: value for name, value in os.environ.items() if not name.startswith("RECONCILE_")}
    return subprocess.run(
        [sys.executable, "-m", "sample_project.manage", "outbox_reconcile", *arguments],
        cwd=ROOT,
        env=variables,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.slow
def test_the_rules_find_the_databases_of_the_project(tmp_path: Path) -> None:
    """The only error left in the rules is the one that was put there: both variables were set."""
    path = write_rules(tmp_path, extra='severity = "awful"')
    done = manage("--rules", str(path), "--output", str(tmp_path / "out"), "--database", "app=default")
    assert done.returncode == 2, done.stderr
    assert "unknown value 'awful'; use one of: critical, warning, info" in done.stderr
    assert "is not set" not in done.stderr
    assert "RECONCILE_APP" in manage("--rules", str(path)).stderr


def test_a_database_that_is_named_goes_before_the_environment() -> None:
    script = (
        "import django, subprocess, sys; from django.core.management import call_command; django.setup(); "
        "subprocess.run = lambda command, env, check: "
        "(print(env['RECONCILE_APP'], env['RECONCILE_BROKER']), sys.exit(7)); "
        "call_command('outbox_reconcile', database=['app=default'])"
    )
    more = {"DJANGO_SETTINGS_MODULE": "sample_project.settings", "RECONCILE_APP": "old", "RECONCILE_BROKER": "kept"}
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=ROOT,
        env={**os.environ, **more},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 7, done.stderr
    app, _, broker = done.stdout.strip().rpartition(" ")
    assert app not in ("", "old")
    assert broker == "kept"


def test_a_database_that_is_none() -> None:
    done = manage("--database", "app")
    assert done.returncode == 2, "1 would say that there are findings"
    assert "write NAME=ALIAS" in done.stderr
