"""What users see, as one text: names, commands with their arguments, settings, tables, conditions, pages.

surface.txt holds it. After a deliberate change, told in CHANGELOG.md, `python -m tests.house.tables` writes it anew.
"""

from __future__ import annotations

import inspect
import re
from argparse import ArgumentParser
from collections.abc import Iterable, Iterator
from dataclasses import MISSING, fields
from importlib import resources
from pathlib import Path
from typing import Any, Final

from tests.django import configured  # isort: skip
from django.apps import apps
from django.core.management import load_command_class
from django.core.management.base import DjangoHelpFormatter

import outbox
import outbox.contrib.django as django_side
from outbox import errors, events, hooks
from outbox.contrib.console.urls import PAGES
from outbox.contrib.django.operations.known_conditions import catalogue
from outbox.contrib.django.settings.conf import TopicOptions
from outbox.contrib.django.urls import urlpatterns
from outbox.contrib.prometheus.urls import urlpatterns as of_prometheus
from tests.house.tables import SETTINGS, thresholds
from tests.part_apps import app_of, command_files

SURFACE: Final[Path] = Path(__file__).parent / "surface.txt"
# Options that every command of Django has.
_OF_DJANGO: Final = set(ArgumentParser(formatter_class=DjangoHelpFormatter)._option_string_actions) | {
    *("--version", "-v", "--verbosity", "--settings", "--pythonpath", "--traceback", "--no-color", "--force-color"),
    "--skip-checks",
}


def surface() -> str:
    assert configured.OUTBOX
    sections = {
        "names": [*_names(outbox), *_names(django_side), *_names(events)],
        "errors": sorted(
            name for name, one in vars(errors).items() if isinstance(one, type) and one.__module__ == errors.__name__
        ),
        "settings": [
            *(_setting(item) for kind in (*SETTINGS, TopicOptions) for item in fields(kind)),
            *(f"{one.name.upper()} = {(one.warning, one.critical)}" for one in thresholds().values()),
        ],
        "commands": sorted(_commands()),
        "conditions": sorted(catalogue()),
        "pages": sorted(str(one.pattern) for one in (*urlpatterns, *of_prometheus, *PAGES)),
        "tables of the broker": sorted(_tables()),
        "tables of an application": sorted(
            f"{model._meta.db_table}: {', '.join(map(_column, model._meta.local_fields))}"
            for app in apps.get_app_configs()
            if app.name.startswith("outbox")
            for model in app.get_models()
        ),
    }
    return "\n".join("\n".join([f"== {title}", *lines, ""]) for title, lines in sections.items())


def _names(module: Any) -> Iterator[str]:
    for name in sorted(module.__all__):
        found = getattr(module, name)
        # The text of an annotation differs between versions of Python; names, kinds and defaults do not.
        parameters = inspect.signature(found).parameters.values() if inspect.isfunction(found) else None
        yield f"{module.__name__}.{name}{'' if parameters is None else f'({_shown(parameters)})'}"


def _shown(parameters: Iterable[inspect.Parameter]) -> str:
    shown: list[str] = []
    for one in parameters:
        if one.kind is one.KEYWORD_ONLY and not any(text.startswith("*") for text in shown):
            shown.append("*")
        stars = "**" if one.kind is one.VAR_KEYWORD else "*" if one.kind is one.VAR_POSITIONAL else ""
        shown.append(f"{stars}{one.name}{'' if one.default is one.empty else '=…'}")
    return ", ".join(shown)


def _setting(item: Any) -> str:
    given = sorted(item.default) if isinstance(item.default, frozenset) else item.default
    default = "made anew" if given is MISSING else re.sub(" at 0x[0-9a-f]+", "", repr(given))[:80]
    return f"{item.name.upper()} = {default}"


def _commands() -> Iterator[str]:
    for path in command_files():
        parser = load_command_class(app_of(path.stem), path.stem).create_parser("manage.py", path.stem)
        yield from _arguments(path.stem, parser)


def _arguments(name: str, parser: ArgumentParser) -> Iterator[str]:
    own = []
    for action in parser._actions:
        if isinstance(action.choices, dict):
            for word, below in action.choices.items():
                yield from _arguments(f"{name} {word}", below)
        elif not action.option_strings:
            own.append(str(action.metavar or action.dest).upper())
        elif not _OF_DJANGO & set(action.option_strings):
            own.append(action.option_strings[-1])
    yield " ".join([name, *own])


def _column(field: Any) -> str:
    return field.column or "+".join(field.columns)


def _tables() -> Iterator[str]:
    packages = ["outbox.broker.schema", *hooks.schemas.values()]
    text = "\n".join(resources.files(one).joinpath("current.sql").read_text("utf-8") for one in packages)
    for name, body in re.findall(r"^CREATE (?:UNLOGGED )?TABLE (\w+) \(\n(.*?)^\)", text, re.MULTILINE | re.DOTALL):
        columns = re.findall(r"^    ([a-z_]\w*) ", body, re.MULTILINE)
        yield f"{name}: {', '.join(columns)}"
