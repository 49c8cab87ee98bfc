"""Every benchmark can be run by its name, and the page of figures names the right ones."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

from benchmarks.__main__ import NAMES

_ROOT = Path(__file__).resolve().parents[2]


def test_each_name_is_a_script_with_a_main() -> None:
    for name in NAMES:
        found = importlib.util.find_spec(f"benchmarks.{name}")
        assert found is not None and found.origin is not None, name
        assert "def main() -> None:" in Path(found.origin).read_text(), name


def test_the_page_names_scripts_that_exist() -> None:
    page = (_ROOT / "docs" / "performance.md").read_text()
    commands = set(re.findall(r"python -m benchmarks[. ]([a-z_]+)", page))
    goals = set(re.findall(r"\| `([a-z_]+)(?: --before CHECKOUT)?` \|$", page, re.MULTILINE))
    assert len(goals) >= 10
    assert {name for name in commands | goals if not (_ROOT / "benchmarks" / f"{name}.py").exists()} == set()
