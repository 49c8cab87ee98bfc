"""Runs page_cases.py by Django's own runner: a process has one settings module, and here it is the sample's."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

from tests.sample.conftest import ROOT


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_pages_by_the_test_client(sample_environment: dict[str, str]) -> None:
    environment = {**os.environ, **sample_environment, "SAMPLE_PATH": "two-phase"}
    command = [
        sys.executable,
        "-W",
        "error",
        "-m",
        "sample_project.manage",
        "test",
        "tests.sample.page_cases",
        "--no-input",
    ]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    ran = re.search(r"Ran (\d+) tests", done.stderr)
    assert ran and int(ran[1]) >= 15, done.stderr
