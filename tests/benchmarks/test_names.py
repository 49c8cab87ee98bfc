"""Every benchmark can be run by its name, and the pages of figures name the right ones."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

from benchmarks import tables
from benchmarks.__main__ import NAMES
from benchmarks.goal_list import GOALS
from benchmarks.goal_parts import PARTS, SIZES

_SCRIPTS = Path(__file__).resolve().parents[2] / "benchmarks"


def test_each_name_is_a_script_with_a_main() -> None:
    for name in NAMES:
        found = importlib.util.find_spec(f"benchmarks.{name}")
        assert found is not None and found.origin is not None, name
        assert "def main() -> None:" in Path(found.origin).read_text(), name


def test_the_pages_name_scripts_that_exist() -> None:
    for page in tables.pages():
        commands = set(re.findall(r"python -m benchmarks[. ]([a-z_]+)", page.read_text(encoding="utf-8")))
        assert {name for name in commands if not _exists(name)} == set(), page


def _exists(name: str) -> bool:
    return (_SCRIPTS / f"{name}.py").exists() or (_SCRIPTS / name / "__main__.py").exists()


def test_each_block_is_on_one_page_and_has_figures() -> None:
    named = [name for page in tables.pages() for name in tables.names(page.read_text(encoding="utf-8"))]
    always = {*(f"goals_{part}" for part in PARTS), "goals", *tables._OF_SIZING}
    assert len(named) == len(set(named)) and always <= set(named) <= always | set(tables.SCRIPTS)
    assert [name for name in named if name not in always and tables.script(name) == ""] == [], "an empty table"
    assert {goal.part for goal in GOALS} == set(PARTS) == set(SIZES)
