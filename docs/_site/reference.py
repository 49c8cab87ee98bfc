"""A Sphinx directive that writes the reference pages from the code: `{outbox-reference} NAME`.

The names are the functions of `PARTS`. Each function returns Markdown.
"""

from __future__ import annotations

import argparse
import inspect
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Final

from django.core.management import get_commands, load_command_class
from docutils import nodes
from prometheus_client import CollectorRegistry
from prometheus_client.metrics import MetricWrapperBase
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

from outbox import errors
from outbox.broker.operations.audit import Audit
from outbox.broker.operations.conditions import ConditionReport
from outbox.broker.operations.summary import Overview, Summary
from outbox.contrib.prometheus.collector import BrokerCollector, ScrapeState
from outbox.contrib.prometheus.recorder import PrometheusRecorder
from spark.judging.remedies import REMEDIES
from spark.rules.rule import FAULTS, FindingClass

_DOCS: Final = Path(__file__).parent.parent


def commands() -> str:
    """Each command with its help, its subcommands and their arguments."""
    names = sorted(name for name, app in get_commands().items() if str(app).startswith("outbox."))
    return "\n".join(line for name in names for line in _command(name))


def _command(name: str) -> Iterator[str]:
    parser = load_command_class(get_commands()[name], name).create_parser("manage.py", name)
    yield f"## `{name}`\n\n{parser.description}\n"
    yield from _arguments(parser, name)


def _arguments(parser: argparse.ArgumentParser, name: str) -> Iterator[str]:
    own = [action for action in parser._actions if not _is_of_django(action)]
    plain = [action for action in own if not isinstance(action, argparse._SubParsersAction)]
    if plain:
        yield from ["| argument | meaning |", "|---|---|"]
        yield from (f"| `{_shown(action)}` | {_help(action)} |" for action in plain)
        yield ""
    for action in own:
        if isinstance(action, argparse._SubParsersAction):
            for verb, child in action.choices.items():
                meaning = next((one.help for one in action._choices_actions if one.dest == verb), "")
                yield f"### `{name} {verb}`\n\n{meaning or child.description or ''}\n"
                yield from _arguments(child, f"{name} {verb}")


# The arguments that every command of Django has.
_OF_DJANGO: Final = {
    *("help", "version", "verbosity", "settings", "pythonpath", "traceback", "no_color", "force_color", "skip_checks")
}


def _is_of_django(action: argparse.Action) -> bool:
    return action.dest in _OF_DJANGO or action.help == argparse.SUPPRESS


def _shown(action: argparse.Action) -> str:
    name = max(action.option_strings, key=len, default="")
    metavar = action.metavar[0] if isinstance(action.metavar, tuple) else action.metavar
    value = "" if action.nargs == 0 else metavar or action.dest.upper()
    return f"{name} {value}".strip()


def _help(action: argparse.Action) -> str:
    written = action.help or ""
    text = (written % vars(action)).replace("|", "\\|")
    says_default = "%(default)" in written or action.default in (None, False, [], "", argparse.SUPPRESS)
    return text if says_default else f"{text} (default: `{action.default}`)"


def findings() -> str:
    """Each class of a finding with its meaning, the first check and the step that settles it."""
    return _table(
        ("class", "meaning", "check first", "what settles it"),
        (
            (name.value, REMEDIES[name].meaning, REMEDIES[name].check, REMEDIES[name].settle)
            for name in (*FAULTS, FindingClass.EXPIRED, FindingClass.RECOVERED)
        ),
    )


def error_classes() -> str:
    """Each error with its base class and its default text."""
    found = [
        kind
        for kind in vars(errors).values()
        if inspect.isclass(kind) and issubclass(kind, errors.OutboxError) and kind.__module__ == errors.__name__
    ]
    return _table(
        ("error", "base class", "meaning"),
        ((f"`{kind.__name__}`", f"`{kind.__mro__[1].__name__}`", inspect.getdoc(kind) or "") for kind in found),
    )


def metrics() -> str:
    """Each metric with its kind, its labels and its meaning, as an empty broker yields them."""
    registry = CollectorRegistry()
    PrometheusRecorder(registry)
    summary = Summary(0.0, 0.0, 0.0, [], [], [], [])
    empty = ScrapeState(
        ConditionReport([]),
        Overview("", 0, 0, None, 0, 0.0, 0.0, [], [], 0),
        summary,
        Audit("", 0.0, 0.0, [], {"topics": {}, "groups": {}}),
    )
    BrokerCollector(lambda: empty, registry)
    of_processes = {
        family.name: collector._labelnames
        for collector in registry._collector_to_names
        if isinstance(collector, MetricWrapperBase)
        for family in collector.describe()
    }
    return _table(
        ("metric", "kind", "labels", "meaning"),
        (
            (
                f"`{family.name}{'_total' if family.type == 'counter' else ''}`",
                family.type,
                ", ".join(f"`{label}`" for label in of_processes.get(family.name, getattr(family, "_labelnames", ()))),
                family.documentation,
            )
            for family in sorted(registry.collect(), key=lambda one: one.name)
        ),
    )


def _table(header: tuple[str, ...], rows: Iterable[Iterable[str]]) -> str:
    lines = [" | ".join(cell.replace("\n", " ").replace("|", "\\|") for cell in row) for row in (header, *rows)]
    lines.insert(1, "|".join("---" for _ in header))
    return "\n".join(f"| {line} |" for line in lines)


PARTS: Final[Mapping[str, Callable[[], str]]] = {
    "commands": commands,
    "errors": error_classes,
    "findings": findings,
    "metrics": metrics,
}


class Reference(SphinxDirective):
    """The directive `outbox-reference`."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        return self.parse_text_to_nodes(PARTS[self.arguments[0]](), allow_section_headings=True)


# Files of the repository outside docs/, and their pages on the site.
_OUTSIDE: Final = {
    "CONTRIBUTING.md": "maintainers/contributing",
    "CHANGELOG.md": "maintainers/changelog",
    "sample_project/README.md": "maintainers/sample-project",
}
_LINK: Final = re.compile(r"\[([^]]+)\]\((?!\w+://|#)([^)#\s]+)(#[^)\s]*)?\)")


def lead_to_pages(app: Sphinx, name: str, source: list[str]) -> None:
    """Show the files of `_OUTSIDE` as pages, and let links to these files lead to the pages.

    On GitHub, each of these pages only links to its file. A link to another file outside docs/ becomes plain text.
    """
    file = next((file for file, page in _OUTSIDE.items() if page == name), None)
    text = source[0] if file is None else (_DOCS.parent / file).read_text(encoding="utf-8")
    folder = (_DOCS / name).parent if file is None else (_DOCS.parent / file).parent

    def rewritten(found: re.Match[str]) -> str:
        text, target, anchor = found[1], found[2], found[3] or ""
        if text.startswith("!") or found.string[found.start() - 1 : found.start()] == "!":
            return found[0]
        path = (folder / target).resolve()
        page = _OUTSIDE.get(path.relative_to(_DOCS.parent).as_posix())
        if page is None and not path.is_relative_to(_DOCS):
            return text
        to = path if page is None else _DOCS / f"{page}.md"
        return f"[{text}]({os.path.relpath(to, (_DOCS / name).parent)}{anchor})"

    source[0] = _LINK.sub(rewritten, text)


def setup(app: Sphinx) -> dict[str, bool]:
    app.add_directive("outbox-reference", Reference)
    app.connect("source-read", lead_to_pages)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
