"""Runs pytest as a project runs it, with databases of its own, and returns the failures."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final
from xml.etree import ElementTree

from outbox.broker import embedded

ROOT: Final = Path(__file__).resolve().parent.parent.parent


def urls(server_url: str, aliases: Sequence[str]) -> dict[str, str]:
    """The databases of a run, as variables; pytest-django makes test databases beside them."""
    return {
        f"TEST_{alias.upper()}_URL": embedded.database_url(server_url, f"crash_kit_{os.getpid()}_{alias}")
        for alias in aliases
    }


def failures(
    tests: Sequence[str], folder: Path, variables: Mapping[str, str], *, within_seconds: float
) -> dict[str, str]:
    """Run tests, which pytest gets as arguments. Return the failure of each test, '' for a test that passes."""
    (folder / "none.ini").write_text("[pytest]\n")
    result = folder / "result.xml"
    isolated = ("-p", "no:cacheprovider", "--noconftest", "-c", str(folder / "none.ini"), f"--rootdir={folder}")
    finished = subprocess.run(
        [sys.executable, "-m", "pytest", *isolated, "--tb=short", f"--junitxml={result}", *tests],
        env={
            **{name: value for name, value in os.environ.items() if name != "OUTBOX_FAULTS"},
            "PYTHONPATH": str(ROOT),
            **variables,
        },
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=within_seconds,
    )
    assert result.exists(), finished.stdout
    found = {}
    for case in ElementTree.parse(result).iter("testcase"):
        problems = [*case.iter("failure"), *case.iter("error")]
        found[case.attrib["name"]] = "\n".join(f"{item.attrib['message']}\n{item.text}" for item in problems)
    assert found, finished.stdout
    return found
