"""The cards of the operations page: each condition with its evidence and its remedy, and the tiles of figures.

See decision 221.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final
from urllib.parse import urlencode

from django.urls import reverse

from outbox.broker.operations.conditions import Condition, Fact, Severity, duration
from outbox.contrib.django.console.asking import as_uuid

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
    "unknown_version": ("events", "state=unknown", "Events"),
    "endpoint_disabled": ("endpoints", "", "Endpoints"),
    "reconciliation_findings": ("findings", "", "Findings"),
    "retention_behind": ("topics", "", "Topics"),
    **dict.fromkeys(("contradicted", "refused", "wrong_ledger", "checker_disagrees", "expired", "path_flipped"),
                    ("incidents", "", "Incidents")),
    **dict.fromkeys(("process_failing", "crash_loop", "hung_handlers", "suspects", "claim_held_long"),
                    ("workers", "", "Workers")),
    **dict.fromkeys(("outage", "limit_binding"), ("groups", "", "Groups")),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Remedy:
    """An action that may end a condition: the action's name, the text of its button, and the values of its fields."""

    action: str
    label: str
    tone: str
    fields: Mapping[str, str]


# The facts of a condition that the fields of an action need: for each action, the name of a fact by the name of a
# field. A value that begins with "=" is constant.
_RemedyRow = tuple[str, str, str, Mapping[str, str]]
_RESUME: Final[_RemedyRow] = ("resume", "Resume {group} …", "good", {"group": "group"})
_PAUSE: Final[_RemedyRow] = ("pause", "Pause {group} …", "plain", {"group": "group"})
_SKIP: Final[_RemedyRow] = (
    "skip", "Skip this message …", "bad", {"group": "group", "topic": "topic", "id": "message"},
)  # fmt: skip
_REMEDIES: Final[Mapping[str, Sequence[_RemedyRow]]] = {
    "unanswered": (("ask", "Ask again …", "plain", {"group": "producer_group"}),),
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
    "suspects": (_PAUSE,),
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
    """The facts of one group, queue, message or session, and the actions on it."""

    items: Sequence[EvidenceItem]
    remedies: Sequence[Remedy]


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
    """One figure with a link to its list. `tone`: ok, warning or critical."""

    name: str
    value: object
    detail: str
    url: str
    tone: str


def cards(conditions: Iterable[Condition], *, group: str | None = None) -> list[ConditionCard]:
    """The cards of the conditions. With `group`, only evidence about this consumer group, and its conditions."""
    found = []
    for one in conditions:
        facts = [fact for fact in one.evidence if group is None or fact.get("group") == group]
        if facts or group is None:
            found.append(_card(one, facts, count=len(facts) if group else one.count))
    return found


def _card(condition: Condition, facts: Sequence[Fact], *, count: int) -> ConditionCard:
    page, query, link = _PLACES.get(condition.name, ("", "", ""))
    url = f"{reverse(f'outbox:{page}')}?{query}".rstrip("?") if page else ""
    # Several facts may have the same remedy, for example the stopped queues of one group.
    offered: list[Remedy] = []
    evidence = []
    for fact in facts:
        remedies = [remedy for remedy in _remedies(condition.name, fact) if remedy not in offered]
        offered += remedies
        evidence.append(Evidence(list(_items(fact)), remedies))
    shown = Condition(
        condition.name, condition.severity, facts, count, condition.meaning, condition.next_step
    )  # fmt: skip
    return ConditionCard(shown, condition.severity.name.lower(), evidence, url, link)


def _remedies(name: str, fact: Fact) -> Iterator[Remedy]:
    for action, label, tone, fields in _REMEDIES.get(name, ()):
        given = {
            field: source[1:] if source[0] == "=" else str(fact.get(source) or "") for field, source in fields.items()
        }
        if all(given.values()):
            yield Remedy(action, label.format(**given), tone, given)


def _items(fact: Fact) -> Iterator[EvidenceItem]:
    for name, value in fact.items():
        if value in (None, ""):
            continue
        is_span = name.endswith("seconds") and isinstance(value, (int, float))
        shown = duration(float(value)) if is_span and value is not None else str(value)
        yield EvidenceItem(name.removesuffix("_seconds").replace("_", " "), shown, _url(name, str(value), fact))


def _url(name: str, value: str, fact: Fact) -> str:
    if name == "group" and fact.get("topic"):
        # The page of the group then has the queues of this topic, and the form to change its limits.
        place = "#limits" if "waiting_for" in fact else ""
        return f"{reverse('outbox:group')}?{urlencode({'name': value, 'topic': fact['topic']})}{place}"
    if name in ("group", "topic"):
        return f"{reverse(f'outbox:{name}')}?{urlencode({'name': value})}"
    if name == "producer_group":
        return f"{reverse('outbox:undecided')}?{urlencode({'group': value})}"
    if name in ("message", "transaction", "subject", "transactions") and (found := as_uuid(value)) is not None:
        return reverse("outbox:message", args=[found])
    return ""


def tone_of(conditions: Iterable[Condition], *names: str) -> str:
    """The worst severity of the conditions with one of these names: ok, warning or critical."""
    return max((one.severity for one in conditions if one.name in names), default=Severity.OK).name.lower()
