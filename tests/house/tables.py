"""Writes what is made from the code: tables of the documents, alerts, and the snapshot of what users see.

`python -m tests.house.tables` rewrites the tables and lists in docs/, the alert rules and the dashboard that the
package ships, and surface.txt. A table is between `<!-- table: NAME -->` and `<!-- end of table -->`.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, fields
from functools import partial
from pathlib import Path
from posixpath import relpath
from typing import Any, Final

from tests.django import configured  # isort: skip

from outbox import hooks
from outbox.broker.operations.conditions import Concern, Symptom, Threshold
from outbox.contrib.django.catalogue import ACTIONS
from outbox.contrib.django.operations.known_conditions import catalogue
from outbox.contrib.django.settings.conf import (
    OutboxSettings,
    TopicOptions,
)
from outbox.contrib.django.settings.definition import REQUIRED, Setting, definitions
from outbox.contrib.forwarding.settings import DeclaredForward
from outbox.contrib.large_bodies.settings import DeclaredLargeBodies
from outbox.contrib.receiving.settings import DeclaredReceive
from outbox.contrib.rocketmq import operator_table
from outbox.contrib.schedules.settings import DeclaredSchedule
from outbox.contrib.tasks.backend import TaskOptions
from outbox.subscription import Subscription
from tests.house import alerts
from tests.house.parts import ROOT

# The default and the meaning of each parameter of @subscriber that is not a field of Subscription.
AROUND_THE_HANDLER: Final[Mapping[str, tuple[str, str]]] = {
    "tag": ("all", "the handler gets only messages with this tag, or with one tag of a list; in place of `filter`"),
    "idempotent": (
        "`True`",
        "the handler runs in a transaction with its inbox row. `False`: the handler runs without transaction and inbox "
        "row, so its effect may happen again",
    ),
    "using": ("the routers' choice", "alias of the database of the handler's transaction"),
}
# The keys of OUTBOX: those of the core, and those of the parts.
SETTINGS: Final = (OutboxSettings, *hooks.settings.values())
_BLOCK: Final = re.compile(r"(<!-- table: ([\w. ]+) -->\n).*?(<!-- end of table -->)", re.DOTALL)
# A page that a next step names.
_PAGE: Final = re.compile(r"\bdocs/([\w/-]+)\.md#?([\w-]*)")
_UNITS: Final = (("days", 24 * 3600), ("hours", 3600), ("minutes", 60))


def rendered(page: str) -> str:
    """Make the tables of a page again from the definitions, and return the new text of the page.

    Raises KeyError for an unknown table.
    """
    return _BLOCK.sub(lambda found: f"{found[1]}{TABLES[found[2]]()}{found[3]}", page)


def names_of_tables(page: str) -> list[str]:
    """Return the names of the tables on a page."""
    return [found[2] for found in _BLOCK.finditer(page)]


def _table(header: tuple[str, ...], rows: Iterable[Iterable[str]]) -> str:
    lines = [f"| {' | '.join(cells)} |\n" for cells in (header, *rows)]
    return "".join([lines[0], "|---" * len(header), "|\n", *lines[1:]])


def _shown(value: object, shown: str = "", *, unit: str = "") -> str:
    """Return a default value as a project writes it.

    For a long time, the text also has the value in a larger unit, such as days.
    """
    if shown:
        return shown
    if value is REQUIRED:
        return "required"
    if isinstance(value, (tuple, list)):
        return f"`[{', '.join(_number(one) for one in value)}]`"
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return f"`{_number(value)}`" + (_in_words(value) if unit == "seconds" else "")
    return f'`"{value}"`' if isinstance(value, str) else f"`{value!r}`"


def _number(value: float) -> str:
    return f"{value:.15g}"


def _in_words(value: float) -> str:
    for name, size in _UNITS:
        if value >= 2 * size and value % size == 0:
            return f" ({value / size:g} {name})"
    return ""


def _meaning(one: Setting) -> str:
    return f"{one.meaning} (bundled broker only)" if one.bundled_only else one.meaning


def _settings(*kinds: type, section: str = "", header: str = "option") -> str:
    rows = (
        (f"`{one.name}`", _shown(one.default, one.shown, unit=one.rule.unit), one.rule.kind, _meaning(one))
        for kind in kinds
        for one in definitions(kind).values()
        if one.section == section
    )
    return _table((header, "default", "value", "meaning"), rows)


def _subscriber() -> str:
    own = {
        item.name: (
            _shown(_default(item), item.metadata["shown"], unit=item.name.rpartition("_")[2]),
            item.metadata["meaning"],
        )
        for item in fields(Subscription)
    }
    rows = ((f"`{name}`", *said) for name, said in {**own, **AROUND_THE_HANDLER}.items())
    return _table(("option", "default", "meaning"), rows)


def _default(item: Any) -> object:
    return item.default if item.default_factory is MISSING else item.default_factory()


def thresholds() -> dict[str, Threshold]:
    """The thresholds of all conditions, by name."""
    return {one.name: one for declared in catalogue().values() for one in declared.thresholds}


def _thresholds() -> str:
    rows = (
        (f"`{one.name.upper()}`", _limit(one.warning, one.unit), _limit(one.critical, one.unit), one.unit, one.meaning)
        for one in thresholds().values()
    )
    return _table(("name", "warning", "critical", "unit", "meaning"), rows)


def _limit(value: float | None, unit: str) -> str:
    if value is None:
        return "never"
    if unit == "bytes":
        return f"{value / 2**30:g} GiB"
    return f"{value:,.15g}" + (_in_words(value) if unit == "seconds" else "")


def _conditions() -> str:
    rows = (
        (f"`{name}`", one.meaning, f"[{one.symptom}](../operations/index.md#{_words_of(one.symptom, '-').lower()})")
        for name, one in sorted(catalogue().items())
    )
    return _table(("condition", "meaning", "next step"), rows)


def _steps(symptom: Symptom) -> str:
    """The next steps of a section of docs/operations/index.md, with links and complete commands."""
    lines = []
    for name, one in sorted(catalogue().items()):
        if one.symptom is symptom:
            step = one.next_step.replace("`outbox_", "`manage.py outbox_")
            lines.append(f"- `{name}`: {_PAGE.sub(_linked, step)}\n")
    return "".join(lines)


def _linked(found: re.Match[str]) -> str:
    page, anchor = found.groups()
    title = _words_of(anchor or page.removesuffix("/index").rpartition("/")[2], " ")
    return f"[{title}]({relpath(page, 'operations')}.md{anchor and '#'}{anchor})"


def _words_of(text: str, between: str) -> str:
    return re.sub("[ -]", between, text)


def _buttons() -> str:
    """The conditions with a button, or with a link to the form of an action; those with the same ones in one row."""
    rows: dict[str, list[str]] = {}
    for name, one in sorted(catalogue().items()):
        labels = [re.sub(r"{(\w+)}", r"the \1", button.label) for button in one.shown.remedies]
        if one.shown.settled is not None and one.shown.settled.section in ACTIONS:
            labels.append(f"{one.shown.settled.link} (a form)")
        if labels:
            rows.setdefault(", ".join(labels), []).append(f"`{name}`")
    return _table(("condition", "buttons"), ((", ".join(names), labels) for labels, names in rows.items()))


def _concerns(header: str, *, pages: bool) -> str:
    rows = (
        # In the order of the names: parts declare their conditions when their modules are imported.
        (concern, ", ".join(f"`{name}`" for name, one in sorted(catalogue().items()) if one.concern is concern))
        for concern in Concern
        if concern.pages is pages
    )
    return _table((header, "conditions"), rows)


def _on_rocketmq(kind: str, table: Mapping[str, str]) -> str:
    return _table((kind, "on RocketMQ"), ((f"`{name}`", instead) for name, instead in table.items()))


TABLES: Final[Mapping[str, Callable[[], str]]] = {
    **{
        f"settings {section}": partial(_settings, *SETTINGS, section=section, header="key")
        for section in dict.fromkeys(one.section for kind in SETTINGS for one in definitions(kind).values())
    },
    "topic options": partial(_settings, TopicOptions),
    "forward options": partial(_settings, DeclaredForward),
    "receive options": partial(_settings, DeclaredReceive),
    "large body options": partial(_settings, DeclaredLargeBodies),
    "schedule options": partial(_settings, DeclaredSchedule),
    "task options": partial(_settings, TaskOptions),
    "subscriber options": _subscriber,
    "thresholds": _thresholds,
    "conditions": _conditions,
    "buttons of conditions": _buttons,
    **{f"next steps {symptom.name}": partial(_steps, symptom) for symptom in Symptom},
    "alerts that page": partial(_concerns, "critical pages, because", pages=True),
    "alerts for tickets": partial(_concerns, "never critical with the default thresholds: a ticket", pages=False),
    "commands on RocketMQ": partial(_on_rocketmq, "command", operator_table.COMMANDS),
    "pages on RocketMQ": partial(_on_rocketmq, "page", operator_table.PAGES),
}


def write(folder: Path) -> list[Path]:
    """Write the tables of all pages below a folder again, and return the changed pages."""
    changed = []
    for page in sorted(folder.rglob("*.md")):
        before = page.read_text(encoding="utf-8")
        if (after := rendered(before)) != before:
            page.write_text(after, encoding="utf-8")
            changed.append(page)
    return changed


if __name__ == "__main__":
    assert configured.OUTBOX
    for page in write(ROOT / "docs"):
        sys.stdout.write(f"{page}\n")
    alerts.write()
    # It imports this module.
    from tests.house import surface

    surface.SURFACE.write_text(surface.surface(), encoding="utf-8")
