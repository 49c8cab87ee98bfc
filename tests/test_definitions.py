"""Every setting and option has one definition, and the documents are written from it."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

from outbox.contrib.django.settings.conf import (
    OutboxSettings,
    TopicOptions,
)
from outbox.contrib.django.settings.definition import definitions
from outbox.contrib.django.subscribers.registry import _OPTIONS, subscriber
from outbox.contrib.forwarding.settings import DeclaredForward
from outbox.contrib.receiving.settings import DeclaredReceive
from outbox.contrib.schedules.settings import DeclaredSchedule
from outbox.contrib.tasks.backend import TaskOptions
from outbox.subscription import Subscription
from tests.house.tables import SETTINGS, TABLES, names_of_tables, rendered, thresholds

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted((ROOT / "docs").rglob("*.md"))
CODE = [path for folder in ("outbox", "spark") for path in sorted((ROOT / folder).rglob("*.py"))]
KINDS = [*SETTINGS, TopicOptions, DeclaredForward, DeclaredReceive, DeclaredSchedule, TaskOptions]
ALL = [one for kind in KINDS for one in definitions(kind).values()]
OF_OUTBOX = [one for kind in SETTINGS for one in definitions(kind).values()]

# They take the whole environment, or a part of it under another name; the variables that they then look up.
WHOLE = {
    "outbox/broker/supervisor.py": set(),
    "outbox/contrib/reconciliation/management/commands/outbox_reconcile.py": set(),
    "outbox/contrib/django/worker/probes.py": {"OUTBOX_HEARTBEAT"},
    "spark/rules/file.py": {"RECONCILE_…"},
    "spark/session.py": {"JAVA_HOME", "PATH", "JAVA_TOOL_OPTIONS", "JDK_JAVA_OPTIONS"},
}

# -- definitions -----------------------------------------------------------------------------------


def test_every_setting_has_a_meaning_and_says_which_values_it_takes() -> None:
    for kind in KINDS:
        for one in definitions(kind).values():
            assert one.meaning, one.name
            assert one.rule.kind, one.name


def test_every_number_has_a_unit() -> None:
    for one in ALL:
        if isinstance(one.default, (int, float)) and not isinstance(one.default, bool):
            assert one.rule.unit, one.name
        assert one.rule.unit in one.rule.kind
        assert one.name.upper().endswith("_SECONDS") == (one.rule.unit == "seconds"), one.name


def test_every_default_is_allowed_by_its_rule() -> None:
    for one in ALL:
        if one.default is not None and one.default not in ("", {}) and isinstance(one.default, (int, float, str)):
            assert one.rule.check(one.name, one.default) == one.default


def test_thresholds_and_subscriber_options_have_meanings() -> None:
    assert [one.name for one in thresholds().values() if not (one.meaning and one.unit)] == []
    assert [item.name for item in fields(Subscription) if not item.metadata["meaning"]] == []


# -- documents -------------------------------------------------------------------------------------


def test_the_tables_of_a_page_are_those_of_the_definitions() -> None:
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        assert text == rendered(text), f"{page.name}: run `python -m tests.house.tables`"


def test_every_table_is_on_one_page() -> None:
    found = [name for page in PAGES for name in names_of_tables(page.read_text(encoding="utf-8"))]
    assert sorted(found) == sorted(TABLES)


def test_every_setting_is_in_a_table_of_the_documents() -> None:
    text = "".join(table() for name, table in TABLES.items() if name.startswith("settings "))
    assert [one.name for one in OF_OUTBOX if f"| `{one.name}` |" not in text] == []


def test_every_option_of_subscriber_is_in_its_table() -> None:
    found = re.findall(r"^\| `(\w+)` \|", TABLES["subscriber options"](), re.MULTILINE)
    assert sorted(found) == sorted((set(inspect.signature(subscriber).parameters) - {"further"}) | _OPTIONS)


def test_an_outdated_table_is_found() -> None:
    page = "<!-- table: thresholds -->\n| outdated |\n<!-- end of table -->\n"
    assert rendered(page) != page
    assert rendered(rendered(page)) == rendered(page)


# -- reading ---------------------------------------------------------------------------------------


def test_every_setting_that_is_named_is_defined() -> None:
    known = {one.name for one in OF_OUTBOX}
    for path in [*CODE, *PAGES, ROOT / "README.md", ROOT / "CONTRIBUTING.md"]:
        text = path.read_text(encoding="utf-8")
        assert set(re.findall(r"""OUTBOX\[\\?["']([A-Z_]+)\\?["']\]""", text)) - known == set(), path


def test_every_setting_that_is_read_is_defined() -> None:
    known = {name for name in dir(OutboxSettings) if not name.startswith("__")}
    read = {
        name for path in CODE for name in re.findall(r"\bget_settings\(\)\.(\w+)", path.read_text(encoding="utf-8"))
    }
    assert len(read) > 10
    assert read - known == set()


def test_every_setting_is_read() -> None:
    elsewhere = "\n".join(path.read_text(encoding="utf-8") for path in CODE if path.parent.name != "settings")
    # Read through the property `check`.
    of_check = {"max_check_age_seconds"}
    names = {name for kind in SETTINGS for name in definitions(kind)}
    assert {name for name in names if not re.search(rf"\.{name}\b", elsewhere)} <= of_check


def test_only_one_module_reads_the_dictionary() -> None:
    reading = {
        path.relative_to(ROOT).as_posix()
        for path in CODE
        if re.search(
            r"""settings\.OUTBOX\b(?!` is)|getattr\(\w*settings, "OUTBOX\"""", path.read_text(encoding="utf-8")
        )
    }
    # `testing` changes a copy of it for the duration of a test.
    assert reading == {"outbox/contrib/django/settings/conf.py", "outbox/contrib/django/testing.py"}


# -- the environment -------------------------------------------------------------------------------


def variables_that_are_read() -> set[str]:
    """The environment variables that the page of names lists (tests/test_names.py)."""
    return {name for path in CODE for name in variables(path)} | {name for names in WHOLE.values() for name in names}


def test_the_whole_environment_is_taken_where_this_file_says_so() -> None:
    taking = {path.relative_to(ROOT).as_posix() for path in CODE if "" in set(variables(path, whole=True))}
    assert taking == set(WHOLE)
    session = (ROOT / "spark" / "session.py").read_text(encoding="utf-8")
    named = set(re.findall(r"""(?:variables|environment)(?:\.get\(|\[)"(\w+)\"""", session))
    assert named == WHOLE["spark/session.py"]


def test_each_way_to_read_the_environment_is_found(tmp_path: Path) -> None:
    path = tmp_path / "reads.py"
    path.write_text(
        "import os\nX: str = 'D'\nos.getenv('A'); os.environ['B']; os.environ.get('C'); os.environ.pop(X)\n"
        "'E' in os.environ; print(os.environ)\n"
    )
    assert set(variables(path)) == set("ABCDE")
    assert set(variables(path, whole=True)) == {*"ABCDE", ""}


def variables(path: Path, *, whole: bool = False) -> Iterator[str]:
    """The variables that a module reads; with `whole`, also '' where it uses the environment as a whole."""
    text = path.read_text(encoding="utf-8")
    if "environ" not in text and "getenv" not in text:
        return
    tree = ast.parse(text)
    alone = {node for node in ast.walk(tree) if _is_environ(node)}
    for node in ast.walk(tree):
        name = environ = None
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            if _is_of_os(node.func, "getenv"):
                name = node.args[0]
            elif _is_environ(node.func.value) and node.func.attr in ("get", "pop", "setdefault"):
                name, environ = node.args[0], node.func.value
        elif isinstance(node, ast.Subscript) and _is_environ(node.value):
            name, environ = node.slice, node.value
        elif isinstance(node, ast.Compare) and _is_environ(node.comparators[0]):
            name, environ = node.left, node.comparators[0]
        if name is not None:
            alone.discard(environ)
            yield _text(path, name)
    if whole:
        yield from ("" for _ in alone)


def _is_environ(node: ast.AST) -> bool:
    return (isinstance(node, ast.Name) and node.id == "environ") or _is_of_os(node, "environ")


def _is_of_os(node: ast.AST, name: str) -> bool:
    """Whether it is `os.NAME`."""
    return isinstance(node, ast.Attribute) and node.attr == name and getattr(node.value, "id", "") == "os"


def _text(path: Path, node: ast.expr) -> str:
    """A literal, or the constant of this module or of another (`metrics.DIRECTORY_VARIABLE`)."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    *module, constant = ast.unparse(node).split(".")
    pattern = re.compile(rf"^{constant}(?:: \w+)? = [\"'](\w+)[\"']", re.MULTILINE)
    places = [path] if not module else [one for one in CODE if one.stem == module[-1]]
    [found] = {value for place in places for value in pattern.findall(place.read_text(encoding="utf-8"))}
    return str(found)
