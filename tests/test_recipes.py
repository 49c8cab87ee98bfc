"""The recipes of CONTRIBUTING.md: a place that was forgotten fails here, or in the test that the recipe names."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest

from outbox.contrib.django.settings.conf import _RULES, OutboxSettings
from outbox.contrib.django.settings.forward_rules import SINKS
from outbox.contrib.django.subscribers.registry import _OPTIONS, subscriber
from outbox.subscription import Subscription
from tests.test_conformance import functions

ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
RECIPES = ["a column to the log", "a condition", "an operator action", "a sink", "a setting", "an engine"]
RECIPES += ["a subscriber option"]

# Filled by the database, and those that only half messages have.
FILLED = {"log_id", "xid", "stored_at"}
OF_HALVES = {"immunity_seconds", "ledger_id", "checker"}
COLUMNS = re.compile(r"INSERT INTO (?:\{schema\}\.)?commit_log(?: AS \w+)? \(([^)]*)\)")


def recipes() -> dict[str, str]:
    """Title -> text."""
    text = PAGE.split("\n## Recipes\n", 1)[1].split("\n## ", 1)[0]
    return {part.split("\n", 1)[0]: part for part in text.split("\n### Add ")[1:]}


def columns(statement: str) -> list[set[str]]:
    """The columns of every INSERT into the log."""
    return [{name.strip() for name in found.split(",")} for found in COLUMNS.findall(statement)]


def current(definitions: list[tuple[str, str]]) -> list[str]:
    """The newest version of each function: `append_one_v14` goes before `append_one_v9`."""
    newest: dict[str, tuple[int, str]] = {}
    for name, source in definitions:
        base, _, number = name.partition("_v")
        newest[base] = max(newest.get(base, (-1, "")), (int(number or 0), source))
    return [source for _, source in newest.values()]


def classes(folder: Path) -> Iterator[tuple[Path, ast.ClassDef]]:
    for path in sorted(folder.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                yield path, node


def methods(node: ast.ClassDef) -> set[str]:
    return {item.name for item in node.body if isinstance(item, (ast.FunctionDef, ast.AsyncFunctionDef))}


def implementations(file: str, protocol: str, folder: str) -> list[str]:
    """Dotted names of the classes in a folder that have all methods of a protocol, which is not among them."""
    [asked] = [node for path, node in classes(ROOT / Path(file).parent) if node.name == protocol]
    return [
        ".".join((*path.relative_to(ROOT).with_suffix("").parts, node.name))
        for path, node in classes(ROOT / folder)
        if methods(asked) <= methods(node) | attributes(node) and node.name != protocol
    ]


def attributes(node: ast.ClassDef) -> set[str]:
    """The names that the body of a class gives a value or a type, and those that its methods set."""
    found = {target.id for item in node.body for target in _targets(item) if isinstance(target, ast.Name)}
    return found | {
        target.attr for item in ast.walk(node) for target in _targets(item) if isinstance(target, ast.Attribute)
    }


def _targets(node: ast.AST) -> list[Any]:
    if isinstance(node, ast.Assign):
        return list(node.targets)
    return [node.target] if isinstance(node, ast.AnnAssign) else []


# -- the recipes -----------------------------------------------------------------------------------


def test_the_page_has_every_recipe() -> None:
    assert sorted(recipes()) == sorted(RECIPES)


@pytest.mark.parametrize("title", RECIPES)
def test_a_recipe_names_at_most_three_places_and_a_test(title: str) -> None:
    text = recipes()[title]
    places = re.findall(r"^\d\. .*?(?=^\d\. |^Fails|\Z)", text, re.MULTILINE | re.DOTALL)
    assert 1 <= len(places) <= 3
    assert all(re.search(r"`[^`]+`", place) for place in places)
    files = re.findall(r"`((?:outbox|tests|docs)/[\w./]+\.(?:py|md|sql))(?:`|::)", text)
    known = [file for file in files if "NNNN" not in file and "NAME" not in file]
    assert known and [file for file in known if not (ROOT / file).is_file()] == []
    _, _, checks = text.partition("\nFails if one is forgotten:")
    tests = re.findall(r"`(tests/[\w/]+\.py)::(test_\w+)`", checks)
    assert tests and [one for one in tests if one[1] not in functions(ROOT / one[0])] == []


# -- a column to the log ---------------------------------------------------------------------------


def test_every_statement_that_appends_fills_every_column_of_the_log(broker_url: str) -> None:
    with psycopg.connect(broker_url) as connection:
        rows = connection.execute("SELECT attname FROM pg_attribute WHERE attrelid = 'outbox.commit_log'::regclass"
                                  " AND attnum > 0 AND NOT attisdropped").fetchall()  # fmt: skip
        definitions = connection.execute(
            "SELECT proname, prosrc FROM pg_proc WHERE pronamespace = 'outbox'::regnamespace"
            " AND prosrc LIKE '%%INSERT INTO commit_log%%'"
        ).fetchall()
    wanted = {name for (name,) in rows} - FILLED
    sources = [path.read_text(encoding="utf-8") for path in (ROOT / "outbox").rglob("*.py")]
    found = [filled for source in [*sources, *current(definitions)] for filled in columns(source)]
    assert len(found) >= 2
    assert [wanted - filled for filled in found if wanted - filled not in (set(), OF_HALVES)] == []
    assert any(wanted <= filled for filled in found), "halves have all columns"


def test_the_check_itself_finds_a_column_that_is_forgotten() -> None:
    assert columns("INSERT INTO {schema}.commit_log (key, tag) SELECT") == [{"key", "tag"}]
    assert current([("one_v9", "old"), ("one_v14", "new"), ("publish", "only")]) == ["new", "only"]


# -- an operator action ----------------------------------------------------------------------------


def test_page_and_commands_call_the_same_functions() -> None:
    django = ROOT / "outbox" / "contrib" / "django"
    pages = "\n".join(path.read_text() for path in (django / "console" / "actions").glob("*.py"))
    commands = "\n".join(path.read_text() for path in (django / "management" / "commands").glob("*.py"))
    called = set(re.findall(r"(?<![.\w])operations\.(\w+)", pages))
    offered = {
        name for line in re.findall(r"operations\.commands import ([^\n]+)", commands) for name in line.split(", ")
    }
    assert len(called) >= 5
    # It only reads: a command shows it as a part of its dry run.
    assert sorted(called - offered) == ["ask_ledger"]


# -- a sink, an engine -----------------------------------------------------------------------------


def test_every_sink_has_a_short_name_and_is_on_the_page() -> None:
    assert sorted(implementations("outbox/contrib/sinks/sink.py", "Sink", "outbox/contrib/sinks")) == sorted(
        SINKS.values()
    )
    page = (ROOT / "docs" / "forwarding.md").read_text(encoding="utf-8")
    assert [name for name in SINKS if f"`{name}`" not in page and f'"{name}"' not in page] == []


def test_every_engine_is_named_by_the_port_and_runs_the_contract_suite() -> None:
    engines = [name.rpartition(".")[2] for name in implementations("outbox/ports.py", "Broker", "outbox")]
    assert {"PostgresBroker", "RocketMQBroker", "InMemoryBroker"} <= set(engines)
    port = (ROOT / "outbox" / "ports.py").read_text(encoding="utf-8").partition("from __future__")[0]
    benches = [ROOT / "tests" / "contract" / "benches.py", *ROOT.glob("tests/*/bench.py")]
    suites = "\n".join(path.read_text(encoding="utf-8") for path in benches)
    assert [name for name in engines if name not in port or name not in suites] == []


# -- a setting, a subscriber option ----------------------------------------------------------------


def test_every_setting_has_a_rule() -> None:
    assert set(_RULES) == {item.name.upper() for item in dataclasses.fields(OutboxSettings)}


def test_the_guide_has_every_setting() -> None:
    page = (ROOT / "docs" / "guide.md").read_text(encoding="utf-8")
    rows = [line.split("|")[1] for line in page.splitlines() if line.startswith("| `")]
    named = {name for row in rows for name in re.findall(r"`([A-Z_]+)`", row)}
    assert sorted(set(_RULES) - named) == []


def test_every_option_of_a_subscription_can_be_given_to_subscriber() -> None:
    # Two words for one filter; and options around the handler that are no part of the subscription.
    more = {"tag", "idempotent", "using", "options"}
    given = (set(inspect.signature(subscriber).parameters) | set(_OPTIONS)) - more
    assert given == {item.name for item in dataclasses.fields(Subscription)}
