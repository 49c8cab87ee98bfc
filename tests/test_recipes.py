"""The recipes of CONTRIBUTING.md: a place that was forgotten fails here, or in the test that the recipe names."""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
from django.utils.module_loading import import_string

from tests.django import configured  # isort: skip

from outbox import hooks
from outbox.broker.log import commit_log
from outbox.contrib.console.urls import LISTED
from outbox.contrib.django.catalogue import ACTIONS, LISTINGS, by_name
from outbox.contrib.django.engine.broker import _ENGINES
from outbox.contrib.django.operations.known_conditions import catalogue
from outbox.contrib.django.settings.conf import EngineName
from outbox.contrib.django.subscribers.registry import _OPTIONS, subscriber
from outbox.contrib.forwarding.settings import SINKS
from outbox.errors import ConfigurationError
from outbox.subscription import Subscription
from tests.test_conformance import functions

ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
RECIPES = ["a column to the log", "a condition", "an operator action", "a sink", "a setting", "an engine"]
RECIPES += ["a subscriber option", "a listing, or a column to one", "a part"]

# It has the methods of the port of consuming, but receives foreign messages.
BESIDE = {"Receiver"}
# Filled by the database, and those that only half messages have.
FILLED = {"log_id", "xid", "stored_at"}
OF_HALVES = {"immunity_seconds", "ledger_id"}
APPENDING = re.compile(r"INSERT INTO commit_log(?: AS \w+)? \(([^)]*)\)")
CONFLICT = "ON CONFLICT ON CONSTRAINT commit_log_message_id_key DO NOTHING"


def recipes() -> dict[str, str]:
    """Title -> text."""
    text = PAGE.split("\n## Recipes\n", 1)[1].split("\n## ", 1)[0]
    return {part.split("\n", 1)[0]: part for part in text.split("\n### Add ")[1:]}


def columns(text: str) -> list[set[str]]:
    """The columns of every INSERT into the log; each leaves out messages that are stored already, or all are new."""
    before, *parts = re.split(r"(?=INSERT INTO commit_log\b)", text)
    for place, part in enumerate(parts):
        assert CONFLICT in part or "IF all_new THEN" in (parts[place - 1] if place else before)
    return [{name.strip() for name in APPENDING.match(part)[1].split(",")} for part in parts]  # type: ignore[index]


def classes(folder: Path) -> Iterator[tuple[Path, ast.ClassDef]]:
    for path in sorted(folder.rglob("*.py")):
        yield from ((path, node) for node in _classes_of(path))


@functools.cache
def _classes_of(path: Path) -> list[ast.ClassDef]:
    nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    return [node for node in nodes if isinstance(node, ast.ClassDef)]


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
    """Each function that appends has an INSERT of its own; they cannot differ in a column."""
    with psycopg.connect(broker_url) as connection:
        rows = connection.execute("SELECT attname FROM pg_attribute WHERE attrelid = 'outbox.commit_log'::regclass"
                                  " AND attnum > 0 AND NOT attisdropped").fetchall()  # fmt: skip
    wanted = {name for (name,) in rows} - FILLED
    files = [path for kind in ("*.py", "*.sql") for path in (ROOT / "outbox").rglob(kind)]
    found = {path.name: each for path in files if (each := columns(path.read_text(encoding="utf-8")))}
    assert found == {
        "append_batch.sql": [wanted, wanted],
        "append_one.sql": [wanted],
        "publish_bytes.sql": [wanted - OF_HALVES],
    }


def test_the_check_itself_finds_a_column_that_is_forgotten() -> None:
    statement = "INSERT INTO commit_log (key, tag) SELECT 1, 2 "
    assert columns(statement + CONFLICT) == [{"key", "tag"}]
    with pytest.raises(AssertionError):
        columns(statement)


def test_a_statement_declares_the_type_of_each_parameter() -> None:
    """Without a type, a cursor of psycopg would store the messages, more slowly and in silence."""
    statement = commit_log._ONE
    assert len(statement.oids) == max(map(int, re.findall(r"\$(\d+)", statement.text)))


# -- a condition -----------------------------------------------------------------------------------


def test_every_condition_is_declared_once_with_a_rule() -> None:
    declared = catalogue()
    assert len(declared) > 40
    assert {name for name, one in declared.items() if one.rule is None} == {"unreachable", "schema_version"}
    for name, one in declared.items():
        assert one.name == name and one.meaning.endswith(".") and one.next_step.endswith("."), name
    sources = [path for path in (ROOT / "outbox").rglob("*.py") if "CONDITIONS.declare(" in path.read_text("utf-8")]
    shown = {one.rule.__module__ for one in declared.values() if one.rule}
    # The engine RocketMQ has its own conditions, and the last module has the example.
    shown |= {"outbox.contrib.rocketmq.operations", "outbox.broker.operations.conditions"}
    modules = {".".join(path.relative_to(ROOT).with_suffix("").parts) for path in sources}
    assert modules == shown, "add the module to rules.py of the broker, or call add_conditions in AppConfig.ready"


# -- an operator action ----------------------------------------------------------------------------


def test_every_action_has_its_case_and_its_button() -> None:
    assert len(ACTIONS) >= 15
    folder = ROOT / "tests" / "django"
    cases = "\n".join(path.read_text("utf-8") for path in (folder / "test_actions.py", *folder.glob("cases_of_*.py")))
    tested = re.findall(r'^ *@case\(\s*"(\w+)"', cases, re.MULTILINE)
    assert set(tested) == set(ACTIONS) and len(tested) == len(ACTIONS)
    pages = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "outbox").rglob("templates/**/*.html"))
    listings = {one.name: one for one in (*LISTED, *LISTINGS.values())}
    places = {*listings, *(f"{name} selected" for name, one in listings.items() if one.choice)}
    places |= set(re.findall(r"{% buttons \"([\w ]+)\"", pages))
    assert {place for one in ACTIONS.values() for place in one.buttons} <= places, "no template has such a place"
    assert {one.form.listing for one in ACTIONS.values() if one.form} <= {one.name for one in LISTED if one.address}
    shown = {name for name, one in ACTIONS.items() if one.buttons or one.section or one.form}
    offered = {name for name, one in ACTIONS.items() if one.permission is not None}
    assert shown == offered


def test_a_template_names_no_action() -> None:
    """So a page works without the parts whose buttons it has."""
    pages = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "outbox").rglob("templates/**/*.html"))
    assert re.findall(r"% action_form \"|act_\w", pages.replace("'outbox:act_'|add:one.action", "")) == []


# -- a sink, an engine -----------------------------------------------------------------------------


def test_every_sink_has_a_short_name_and_is_on_the_page() -> None:
    folder = "outbox/contrib/forwarding/sinks"
    assert set(implementations(f"{folder}/sink.py", "Sink", folder)) == set(SINKS.values())
    page = (ROOT / "docs" / "forwarding.md").read_text(encoding="utf-8")
    assert [name for name in SINKS if f"`{name}`" not in page and f'"{name}"' not in page] == []
    names = (ROOT / "docs" / "maintainers" / "names.md").read_text(encoding="utf-8")
    assert [path for path in SINKS.values() if f"`{path}`" not in names] == []
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    listed = (ROOT / "docs" / "quickstart.md").read_text(encoding="utf-8")
    assert [name for name in SINKS if name in extras and f"`{name}`" not in listed] == []


@pytest.mark.slow
def test_every_engine_runs_the_contract_suite() -> None:
    brokers = [name.rpartition(".")[2] for name in implementations("outbox/ports.py", "Broker", "outbox")]
    consumers = [name.rpartition(".")[2] for name in implementations("outbox/ports.py", "Consumers", "outbox")]
    assert {"PostgresBroker", "RocketMQBroker", "InMemoryBroker"} <= set(brokers)
    assert {"ConsumerRuntime", "RocketMQConsumers", "InMemoryConsumers"} <= set(consumers)
    engines = brokers + [name for name in consumers if name not in BESIDE]
    # A bench alone runs nothing: beside it, the suite is imported.
    suites = [
        path for path in ROOT.glob("tests/*/test_contract.py") if "from tests.contract import" in path.read_text()
    ]
    benches = [ROOT / "tests" / "contract" / "benches.py", *(path.with_name("bench.py") for path in suites)]
    run = "\n".join(path.read_text(encoding="utf-8") for path in benches)
    assert [name for name in engines if name not in run] == []


def test_every_engine_can_be_chosen_by_the_settings() -> None:
    # The engines import models, which need settings and loaded apps.
    assert configured.OUTBOX
    assert set(_ENGINES) == set(EngineName)
    chosen = [import_string(path) for path in (*_ENGINES.values(), *(one.kind for one in hooks.engines.values()))]
    assert len({kind.refusals.engine for kind in chosen}) == len(chosen)
    folder = ROOT / "outbox" / "contrib"
    made = {node.name for _, node in classes(folder) if "Engine" in {ast.unparse(base) for base in node.bases}}
    assert made == {kind.__name__ for kind in chosen}


# -- a subscriber option ---------------------------------------------------------------------------


def test_every_option_of_a_subscription_can_be_given_to_subscriber() -> None:
    # Two words for one filter; and options around the handler that are no part of the subscription.
    more = {"tag", "idempotent", "using", "further"}
    given = (set(inspect.signature(subscriber).parameters) | set(_OPTIONS)) - more
    assert given == {item.name for item in dataclasses.fields(Subscription)}


def test_a_name_that_is_taken_is_refused() -> None:
    """The action declared first would not exist, without a word."""
    letters = LISTINGS["letters"]
    assert by_name([letters, letters]) == {"letters": letters}
    with pytest.raises(ConfigurationError, match="another name"):
        by_name([letters, dataclasses.replace(letters)])
