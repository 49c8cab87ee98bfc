"""The apps talk only through messages: none imports another."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

SAMPLE = Path(__file__).resolve().parent.parent.parent / "sample_project"
APPS = ("orders", "logistics", "points", "cart", "income", "payments", "offers")


def _imports(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add(node.module or "")
    return found


@pytest.mark.parametrize("app", APPS)
def test_no_app_imports_another(app: str) -> None:
    files = list((SAMPLE / app).rglob("*.py"))
    assert files
    others = tuple(f"sample_project.{other}" for other in (*APPS, "storefront", "catalogue") if other != app)
    imports = {(path.name, name) for path in files for name in _imports(path) if name.startswith(others)}
    assert imports == set()


def test_the_check_sees_an_import() -> None:
    assert "sample_project.orders.models" in _imports(SAMPLE / "storefront" / "checkout.py")
