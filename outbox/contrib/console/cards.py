"""The cards of the operations page: each condition with its evidence and its remedy, and the tiles of figures.

A card offers only declared actions, so each one shows a plan, asks for a reason and leaves an audit entry. Conditions
whose remedy is outside of the broker have no button. A next step leads to the page first, and to the command second:
operators who read a command looked for a shell. A condition that another one may cause stands below it.
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
    "retention_behind": ("topics", "", "Topics"),
    **dict.fromkeys(("contradicted", "refused", "wrong_ledger", "checker_disagrees", "expired", "path_flipped"),
                    ("incidents", "", "Incidents")),
    **dict.fromkeys(("process_failing", "crash_loop", "hung_handlers", "quarantined", "claim_held_long"),
                    ("workers", "", "Workers")),
    **dict.fromkeys(("no_sequencer", "part_missing", "ticks_late", "summary_late", "connections_refused"),
                    ("workers", "", "Workers")),
    "outage": ("groups", "", "Groups"),
    "limit_binding": ("groups", "state=limited", "Groups that wait for a limit"),
    "saga_stalled": ("dead_letters", "", "Dead letters by error"),
}  # fmt: skip

# The evidence of a lag that waits for a limit of the group itself is settled like this.
_LIMITED: Final = "limit of the group"

# The next step on the page, for conditions whose next step in the catalogue is a command that the page has as a button
# or a list. The card shows the command second.
_STEPS: Final[Mapping[str, str]] = {
    "unanswered": "Start a worker of the producer group's service with the role check: nothing else answers. If the "
    "service is gone for good, open each transaction and decide it there.",
    "parked": "Open the transaction: it shows the answers of all checks. Then commit it or roll it back with the "
    "buttons; the plan says what the ledger proves.",
    "contradicted": "Open the transaction, and compare the business row with its history. Check whether two services "
    "share one producer group. Then end the condition in a shell.",
    "checker_disagrees": "Open the transaction, and compare the business row with its history. Fix the look-up "
    "function. Then end the condition in a shell.",
    "wrong_ledger": "Point the database alias to the right database. If the ledger is gone, open the transaction and "
    "decide it there without asking the ledger.",
    "lag": "The page of the group shows which queues are behind, and the other conditions of the group. If one of them "
    "stops the group, settle that one. Otherwise add consumers, or fix the slow handler.",
    _LIMITED: "These groups wait for their own limits, so more consumers do not help. If the service behind the "
    "handler allows it, change the limits with the button. Otherwise the group catches up at this speed.",
    "blocked_queue": "Fix the handler, or skip the message with the button.",
    "stopped_queue": "Fix the cause of the handler's error, then resume the group with the button.",
    "group_paused": "When the reason for the pause is gone, resume the group with the button.",
    "quarantined": "Open the message, and fix the handler before the message becomes a dead letter. Until then, pause "
    "the group with the button.",
    "claim_held_long": "Open the message: it shows the steps that are done. Find the call of another system for which "
    "the handler waits, and give this call a timeout.",
    "endpoint_disabled": "If the endpoint exists again, enable it with the button. If it is gone for good, remove its "
    "entry from FORWARD, then delete the group in a shell.",
    "limit_binding": "If the service behind the handler allows it, change the limits with the button.",
    "dead_letters": "Open the list: it shows the errors. Correct the cause, then replay the dead letters. Discard "
    "those that no handler can read or handle.",
    "saga_stalled": "Replay the dead letters of the stalled sagas. The role `check` publishes lost messages again "
    "within a minute.",
    "reconciliation_findings": "The list shows each finding with its next step. Repair the findings, then run the "
    "reconciliation again: the condition ends with the next saved result.",
    "lost_effects": "Reset the group on the topic to the time of the evidence. The broker then delivers the messages "
    "again, and the inbox skips the messages that it knows.",
    "rejecting": "When the reason for the refusal is gone, accept messages again with the button.",
}

# A part of a page that settles a fact: the URL name, the parameters with the names of their facts, the place on the
# page, and the text of the link.
_SETTLED_ON: Final[Mapping[str, tuple[str, Mapping[str, str], str, str]]] = {
    "limit_binding": ("group", {"name": "group", "topic": "topic"}, "limits", "Change the limits …"),
    "lag": ("group", {"name": "group", "topic": "topic"}, "queues", "Its queues"),
    _LIMITED: ("group", {"name": "group", "topic": "topic"}, "limits", "Change the limits …"),
    "lost_effects": ("group", {"name": "group", "topic": "topic"}, "reset", "Reset …"),
    "unanswered": ("undecided", {"group": "producer_group"}, "", "Its transactions"),
    "outage": ("group", {"name": "group"}, "", "Its errors"),
    "dead_letters": ("dead_letters", {"group": "group"}, "", "Its errors"),
}

# The conditions that cause another condition. If the facts of both name groups, the group must be the same.
_CAUSES: Final[Mapping[str, Sequence[str]]] = {
    "lag": (
        *("no_worker", "stopped_queue", "blocked_queue", "endpoint_disabled", "limit_binding", "outage"),
        *("hung_handlers", "quarantined", "unknown_version", "retry_storm", "no_sequencer"),
    ),
    "outage": ("endpoint_disabled",),
    "retry_storm": ("outage",),
    "ticks_late": ("process_failing", "lock_held"),
    "summary_late": ("process_failing", "lock_held"),
    "schedule_late": ("no_sequencer", "process_failing", "lock_held"),
    "unanswered": ("check_back_late", "process_failing"),
    "retention_behind": ("no_sequencer", "transaction_open", "lock_held"),
    "pruning_behind": ("check_back_late", "transaction_open"),
    "saga_stalled": ("dead_letters",),
    "topic_near_limit": ("lag", "group_paused", "no_worker"),
    "topic_over_limit": ("lag", "group_paused", "no_worker"),
    "lock_held": ("transaction_open",),
    "space": ("retention_behind", "transaction_open"),
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
    """A condition as a page shows it. `url` and `link`: the list with all of its groups, queues or messages.

    `next_step`: what to do on the page. `in_a_shell`: the same by command; '' if `next_step` says it already. `causes`:
    the names of the shown conditions that probably cause it.
    """

    condition: Condition
    severity: str
    evidence: Sequence[Evidence]
    url: str
    link: str
    next_step: str
    in_a_shell: str = ""
    causes: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Tile:
    """One figure with a link to its list. `tone`: ok, unknown, warning or critical."""

    name: str
    value: object
    detail: str
    url: str
    tone: str


def cards(conditions: Iterable[Condition], *, group: str | None = None) -> list[ConditionCard]:
    """The cards of the conditions, the worst first, and each consequence below its cause.

    With `group`, only evidence about this consumer group, and its conditions.
    """
    found = []
    for one in conditions:
        facts = [fact for fact in one.evidence if group is None or fact.get("group") == group]
        if facts or group is None:
            found.append(_card(one, facts, count=len(facts) if group else one.count))
    return list(_with_consequences(found))


def _with_consequences(found: Sequence[ConditionCard]) -> Iterator[ConditionCard]:
    shown = {one.condition.name: one for one in found}
    if len(shown) < len(found):
        # A rule of another app has returned a condition of the broker.
        yield from found
        return
    causes = {name: _causes(one, shown) for name, one in shown.items()}

    def family(name: str, above: tuple[str, ...]) -> Iterator[ConditionCard]:
        """The card, then the consequences of which it is the first cause."""
        yield replace(shown[name], causes=causes[name])
        for other in shown:
            if causes[other][:1] == [name] and other not in above:
                yield from family(other, (*above, other))

    families = [list(family(name, (name,))) for name in shown if not causes[name]]
    # A consequence may be worse than its cause, as a lag is worse than a limit.
    families.sort(key=lambda cards: -max(one.condition.severity for one in cards))
    for one in families:
        yield from one


def _causes(one: ConditionCard, shown: Mapping[str, ConditionCard]) -> list[str]:
    """The names of the causes that hold. If a group of the condition has no cause, the condition has none."""
    causes = [
        name for name in _CAUSES.get(one.condition.name, ()) if name in shown and not shown[name].condition.is_unknown
    ]
    groups = _groups(one)
    known = {name: _groups(shown[name]) for name in causes}
    of_each = [{name for name in causes if not known[name] or group in known[name]} for group in groups]
    if not all(of_each):
        return []
    return [name for name in causes if not groups or any(name in some for some in of_each)]


def _groups(one: ConditionCard) -> set[object]:
    return {fact["group"] for fact in one.condition.evidence if fact.get("group")}


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
    shown = replace(condition, evidence=facts, count=count)
    settled = {_settled_as(condition.name, fact) for fact in facts}
    step = None if condition.is_unknown else _STEPS.get(settled.pop() if len(settled) == 1 else condition.name)
    return ConditionCard(
        condition=shown,
        severity=condition.severity.name.lower(),
        evidence=evidence,
        url=url,
        link=link,
        next_step=step or condition.next_step,
        in_a_shell=condition.next_step if step and "`" in condition.next_step else "",
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
        yield EvidenceItem(words(name.removesuffix("_seconds")), shown, _url(name, str(value), fact))


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
