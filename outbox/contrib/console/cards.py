"""The cards of the operations page: each condition with its evidence and its remedy, and the tiles of figures.

A card has the texts of its condition, as the command and the alert have. It offers only declared actions, so each one
shows a plan, asks for a reason and leaves an audit entry. Conditions whose remedy is outside of the broker have no
button.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final
from urllib.parse import urlencode

from django.urls import reverse

from outbox.broker.operations.conditions import Condition, Fact, Severity, duration
from outbox.broker.operations.summary import Overview
from outbox.contrib.console.asking import as_uuid
from outbox.contrib.django.actions.cells import readable, retried_topic, words
from outbox.contrib.django.actions.listing import Button

# The page for a condition: its URL name, its parameters, and the text of the link.
_PLACES: Final[Mapping[str, tuple[str, str, str]]] = {
    "unanswered": ("undecided", "", "Undecided transactions"),
    "check_back_late": ("undecided", "", "Undecided transactions"),
    "parked": ("undecided", "parked=yes", "Parked transactions"),
    "dead_letters": ("dead_letters", "", "Dead letters by error"),
    "retry_storm": ("waiting", "retrying=yes", "Messages that are retried"),
    "lag": ("groups", "state=behind", "Groups that are behind"),
    "blocked_queue": ("groups", "state=failing", "Groups with a failing queue"),
    "stopped_queue": ("groups", "state=stopped", "Groups with a stopped queue"),
    "group_paused": ("groups", "state=paused", "Paused groups"),
    "no_worker": ("groups", "state=unattended", "Groups without a worker"),
    "schedule_late": ("schedules", "", "Schedules"),
    "endpoint_disabled": ("endpoints", "", "Endpoints"),
    "reconciliation_findings": ("findings", "", "Findings"),
    **dict.fromkeys(("retention_behind", "topic_near_limit", "topic_over_limit"), ("topics", "", "Topics")),
    **dict.fromkeys(("contradicted", "refused", "wrong_ledger", "checker_disagrees", "expired", "path_flipped"),
                    ("incidents", "", "Incidents")),
    **dict.fromkeys(("process_failing", "crash_loop", "hung_handlers", "quarantined"),
                    ("workers", "", "Workers")),
    **dict.fromkeys(("no_sequencer", "part_missing", "ticks_late", "summary_late", "connections_refused"),
                    ("workers", "", "Workers")),
    "outage": ("groups", "", "Groups"),
    "limit_binding": ("groups", "state=limited", "Groups that wait for a limit"),
    **dict.fromkeys(("blocked_key", "saga_stalled"), ("dead_letters", "", "Dead letters by error")),
}  # fmt: skip

# The evidence of a lag that waits for a limit of the group itself is settled like this.
_LIMITED: Final = "limit of the group"

# A part of a page that settles a fact: the URL name, the parameters with the names of their facts, the place on the
# page, and the text of the link.
_SETTLED_ON: Final[Mapping[str, tuple[str, Mapping[str, str], str, str]]] = {
    "limit_binding": ("group", {"name": "group", "topic": "topic"}, "limits", "Change the limits …"),
    "lag": ("group", {"name": "group", "topic": "topic"}, "queues", "Its queues"),
    _LIMITED: ("group", {"name": "group", "topic": "topic"}, "limits", "Change the limits …"),
    "lost_effects": ("group", {"name": "group", "topic": "topic"}, "reset", "Reset …"),
    "unanswered": ("undecided", {"group": "producer_group"}, "", "Its transactions"),
    "dead_letters": ("dead_letters", {"group": "group"}, "", "Its errors"),
}

# The facts of a condition that the fields of an action need: for each action, the name of a fact by the name of a
# field. A value that begins with "=" is constant.
_RemedyRow = tuple[str, str, str, Mapping[str, str]]
_RESUME: Final[_RemedyRow] = ("resume", "Resume {group} …", "good", {"group": "group"})
_PAUSE: Final[_RemedyRow] = ("pause", "Pause {group} …", "plain", {"group": "group"})
_SKIP: Final[_RemedyRow] = (
    "skip", "Skip this message …", "bad", {"group": "group", "topic": "topic", "id": "message"},
)  # fmt: skip
_REMEDIES: Final[Mapping[str, Sequence[_RemedyRow]]] = {
    "parked": (
        ("ask", "Ask again …", "plain", {"ids": "transaction"}),
        ("decide", "Commit …", "good", {"id": "transaction", "decision": "=commit"}),
        ("decide", "Roll back …", "bad", {"id": "transaction", "decision": "=rollback"}),
    ),
    "dead_letters": (("replay", "Replay these …", "good", {"group": "group", "all": "=yes"}),),
    "stopped_queue": (_RESUME,),
    "group_paused": (_RESUME,),
    "blocked_queue": (_SKIP, _PAUSE),
    "retry_storm": (_PAUSE,),
    "outage": (_PAUSE,),
    "quarantined": (_PAUSE,),
    "hung_handlers": (_PAUSE,),
    "endpoint_disabled": (("enable_endpoint", "Enable {group} …", "good", {"group": "group"}),),
    "rejecting": (("accept", "Accept messages again …", "good", {}),),
    "schedule_late": (
        ("run_schedule", "Run now …", "plain", {"schedule": "schedule", "producer_group": "producer_group"}),
    ),
}


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

    Among those of one severity, a lag comes last: another condition may be its cause.
    """
    found = []
    for one in sorted(conditions, key=lambda one: (-one.severity, one.name == "lag")):
        facts = [fact for fact in one.evidence if group is None or fact.get("group") == group]
        if facts or group is None:
            found.append(_card(one, facts, count=len(facts) if group else one.count))
    return found


def _card(condition: Condition, facts: Sequence[Fact], *, count: int) -> ConditionCard:
    page, query, link = _PLACES.get(condition.name, ("", "", ""))
    url = f"{reverse(f'outbox:{page}')}?{query}".rstrip("?") if page else ""
    # Several facts may have the same remedy, for example the stopped queues of one group.
    offered: list[Button] = []
    evidence = []
    for fact in facts:
        remedies = [remedy for remedy in _remedies(condition.name, fact) if remedy not in offered]
        offered += remedies
        evidence.append(Evidence(list(_items(fact)), remedies, *_settled_on(_settled_as(condition.name, fact), fact)))
    return ConditionCard(
        condition=replace(condition, evidence=facts, count=count),
        severity=condition.severity.name.lower(),
        evidence=evidence,
        url=url,
        link=link,
    )


def _settled_as(name: str, fact: Fact) -> str:
    return _LIMITED if name == "lag" and fact.get("waiting_for") else name


def _settled_on(name: str, fact: Fact) -> tuple[str, str]:
    if name not in _SETTLED_ON:
        return "", ""
    page, parameters, place, link = _SETTLED_ON[name]
    given = {parameter: retried_topic(str(fact.get(source) or "")) for parameter, source in parameters.items()}
    if not all(given.values()):
        return "", ""
    return f"{reverse(f'outbox:{page}')}?{urlencode(given)}{'#' if place else ''}{place}", link


def _remedies(name: str, fact: Fact) -> Iterator[Button]:
    for action, label, tone, fields in _REMEDIES.get(name, ()):
        given = {
            field: source[1:] if source[0] == "=" else str(fact.get(source) or "") for field, source in fields.items()
        }
        if all(given.values()):
            yield Button(action, label.format(**given), tone, given)


def _items(fact: Fact) -> Iterator[EvidenceItem]:
    for name, value in fact.items():
        if value in (None, ""):
            continue
        shown = duration(value) if name.endswith("seconds") and isinstance(value, (int, float)) else readable(value)
        label = "time" if name == "seconds" else words(name.removesuffix("_seconds"))
        yield EvidenceItem(label, shown, _url(name, str(value), fact))


def _url(name: str, value: str, fact: Fact) -> str:
    if name == "group" and fact.get("topic"):
        # The page of the group then has the queues of this topic, and the form to change its limits.
        place = "#limits" if "waiting_for" in fact else ""
        topic = retried_topic(str(fact["topic"]))
        return f"{reverse('outbox:group')}?{urlencode({'name': value, 'topic': topic})}{place}"
    if name in ("group", "topic"):
        value = retried_topic(value)
        return f"{reverse(f'outbox:{name}')}?{urlencode({'name': value})}"
    if name == "producer_group":
        return f"{reverse('outbox:undecided')}?{urlencode({'group': value})}"
    if name in ("message", "transaction", "subject", "transactions") and (found := as_uuid(value)) is not None:
        return reverse("outbox:message", args=[found])
    return ""


def aged(tile: Tile, broker: Overview) -> Tile:
    """The tile of a counted figure. A figure from before the present leader says so, and does not look good.

    A zero has no colour, also if a condition such as a pause is about the figure.
    """
    if broker.is_current:
        return replace(tile, tone="ok") if tile.value == 0 else tile
    why = "before the present leader" if broker.leader else "and no process leads"
    detail = f"counted {duration(broker.counted_seconds_ago)} ago, {why}"
    return replace(tile, detail=detail, tone="unknown" if tile.tone == "ok" or tile.value == 0 else tile.tone)


def tone_of(conditions: Iterable[Condition], *names: str) -> str:
    """The worst severity of the conditions with one of these names: ok, warning or critical."""
    return max((one.severity for one in conditions if one.name in names), default=Severity.OK).name.lower()
