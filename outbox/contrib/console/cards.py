"""The cards of the operations page: each condition with its evidence and its remedy, and the tiles of figures.

A card offers only declared actions, so each one shows a plan, asks for a reason and leaves an audit entry.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import urlencode

from django.urls import reverse

from outbox.broker.operations.conditions import (
    NO_LIST,
    OF_GROUP,
    Condition,
    DeclaredCondition,
    Fact,
    Place,
    Severity,
    Shown,
    duration,
)
from outbox.broker.operations.summary import Overview
from outbox.contrib.console.asking import as_uuid
from outbox.contrib.django.actions.cells import readable, retried_topic, words
from outbox.contrib.django.actions.declaration import Button
from outbox.contrib.django.operations.known_conditions import catalogue

Catalogue = Mapping[str, DeclaredCondition[Any]]


@dataclass(frozen=True, slots=True)
class EvidenceItem:
    """One fact of a condition's evidence, with a link to a page."""

    name: str
    value: str
    url: str


@dataclass(frozen=True, slots=True)
class Evidence:
    """The facts of one group, queue, message or session, and the actions on it.

    `url` and `link`: the part of a page that settles it, such as a form.
    """

    items: Sequence[EvidenceItem]
    remedies: Sequence[Button]
    url: str = ""
    link: str = ""


@dataclass(frozen=True, slots=True)
class ConditionCard:
    """A condition as a page shows it. `url` and `link`: the list with all of its groups, queues or messages."""

    condition: Condition
    severity: str
    evidence: Sequence[Evidence]
    url: str
    link: str


@dataclass(frozen=True, slots=True)
class Tile:
    """One figure with a link to its list. `tone`: ok, unknown, warning or critical."""

    name: str
    value: object
    detail: str
    url: str
    tone: str


def cards(conditions: Iterable[Condition], *, group: str | None = None) -> list[ConditionCard]:
    """The cards of the conditions, the worst first. With `group`, only evidence about this consumer group.

    Among those of one severity, a condition that may be a symptom comes last.
    """
    declared = catalogue()
    found = []
    for one in sorted(conditions, key=lambda one: (-one.severity, _shown(declared, one.name).may_be_symptom)):
        facts = [fact for fact in one.evidence if group is None or fact.get("group") == group]
        if facts or group is None:
            found.append(_card(one, facts, declared, count=len(facts) if group else one.count))
    return found


def _shown(declared: Catalogue, name: str) -> Shown:
    return declared[name].shown if name in declared else NO_LIST


def _card(condition: Condition, facts: Sequence[Fact], declared: Catalogue, *, count: int) -> ConditionCard:
    shown = _shown(declared, condition.name)
    url, link = _link(shown.listed, {})
    # Several facts may have the same remedy, for example the stopped queues of one group.
    offered: list[Button] = []
    evidence = []
    for fact in facts:
        remedies = [remedy for remedy in _remedies(shown, fact) if remedy not in offered]
        offered += remedies
        evidence.append(Evidence(list(_items(fact, declared)), remedies, *_link(_settled(shown, fact, declared), fact)))
    return ConditionCard(
        condition=replace(condition, evidence=facts, count=count),
        severity=condition.severity.name.lower(),
        evidence=evidence,
        url=url,
        link=link,
    )


def _settled(shown: Shown, fact: Fact, declared: Catalogue) -> Place | None:
    """Where a fact is settled. The condition that names one of its facts as its own comes first."""
    own = (one.shown.settled for one in declared.values() if one.shown.settles and fact.get(one.shown.settles))
    return next(own, shown.settled)


def _link(place: Place | None, fact: Fact) -> tuple[str, str]:
    """The address of a place with the values of a fact, and the text of the link; both '' if a value is missing."""
    given = {} if place is None else _filled(place.query, fact)
    if place is None or not all(given.values()):
        return "", ""
    query = f"?{urlencode(given)}" if given else ""
    return f"{reverse(f'outbox:{place.page}')}{query}{'#' if place.section else ''}{place.section}", place.link


def _filled(fields: Mapping[str, str], fact: Fact) -> dict[str, str]:
    return {
        name: source[1:] if source.startswith("=") else retried_topic(str(fact.get(source) or ""))
        for name, source in fields.items()
    }


def _remedies(shown: Shown, fact: Fact) -> Iterator[Button]:
    for one in shown.remedies:
        given = _filled(one.fields, fact)
        if all(given.values()):
            yield Button(one.label.format(**given), one.tone, given, one.action)


def _items(fact: Fact, declared: Catalogue) -> Iterator[EvidenceItem]:
    for name, value in fact.items():
        if value in (None, ""):
            continue
        shown = duration(value) if name.endswith("seconds") and isinstance(value, (int, float)) else readable(value)
        label = "time" if name == "seconds" else words(name.removesuffix("_seconds"))
        yield EvidenceItem(label, shown, _url(name, str(value), fact, declared))


def _url(name: str, value: str, fact: Fact, declared: Catalogue) -> str:
    if name == "group" and fact.get("topic"):
        # The page of the group then has the queues of this topic, and the form that settles the fact.
        settled = _settled(NO_LIST, fact, declared)
        return _link(Place("group", "", OF_GROUP, settled.section if settled else ""), fact)[0]
    if name in ("group", "topic"):
        value = retried_topic(value)
        if value.startswith("%RETRY%"):
            # A retry topic has no page of its own; its queues are on the page of its group.
            return _link(Place("group", "", OF_GROUP, "queues"), fact)[0]
        return f"{reverse(f'outbox:{name}')}?{urlencode({'name': value})}"
    if name == "producer_group":
        return f"{reverse('outbox:undecided')}?{urlencode({'group': value})}"
    if name in ("message", "transaction", "subject", "transactions") and (found := as_uuid(value)) is not None:
        return reverse("outbox:message", args=[found])
    return ""


def aged(tile: Tile, broker: Overview) -> Tile:
    """The tile of a counted figure. A figure from before the present leader says so; a zero has no colour."""
    if broker.is_current:
        return replace(tile, tone="ok") if tile.value == 0 else tile
    why = "before the present leader" if broker.leader else "and no process leads"
    detail = f"counted {duration(broker.counted_seconds_ago)} ago, {why}"
    return replace(tile, detail=detail, tone="unknown" if tile.tone == "ok" or tile.value == 0 else tile.tone)


def tone_of(conditions: Iterable[Condition], figure: str) -> str:
    """The worst severity of the conditions that colour a figure of the overview: ok, warning or critical."""
    declared = catalogue()
    coloured = (one.severity for one in conditions if _shown(declared, one.name).figure == figure)
    return max(coloured, default=Severity.OK).name.lower()
