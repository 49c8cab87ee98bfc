"""A condition describes a state of outbox that an operator should know.

    LAG_SECONDS = Threshold("lag_seconds", 60, 600, "seconds", "age of the oldest waiting message")

    @CONDITIONS.declare(
        meaning="A group is behind: its messages wait too long.",
        next_step="Add consumers, or fix the slow handler.",
        concern=Concern.WAITING,
        symptom=Symptom.WAITING,
        thresholds=(LAG_SECONDS,),
        shown=Shown(listed=Place("groups", "Groups")),
    )
    def lag(state: BrokerState) -> Iterator[Judged]:
        for one in state.summary.groups:
            age = state.summary.seconds_since(one.oldest_at)
            yield state.judge(LAG_SECONDS, age), {"group": one.group, "oldest_seconds": age}

Status, exit code, probe, doctor, JSON, metric, alert, operations page, signal, and the tables of docs/ show every
declared condition, and nothing else lists them. `rules.py` finds the declarations that need only the broker;
`outbox.contrib.django.operations.known_conditions` adds those about the application's tables. The next step may name
a page, such as docs/operations/deploy.md#scale; docs/operations/index.md has it as a link.

The doctor, `manage.py check` and the probe of a worker report further problems with texts of their own (`of_text`).

See decision 091.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Generic, TypeVar

from outbox.utils.safe_text import for_people

# A condition lists at most this many facts; `count` has the number of all facts.
EVIDENCE: Final = 20
# Facts that are texts of other programs. A line for people has at most this many characters of them; JSON has all.
_TEXTS_OF_OTHERS: Final = ("error", "detail")
_SHOWN: Final = 300
# The facts that say what a condition is about.
SUBJECT: Final = ("group", "topic", "queue", "producer_group")

Fact = Mapping[str, str | int | float | None]
Judged = tuple["Severity | None", Fact]
State = TypeVar("State")
# The warning and the critical value of each threshold that a project has changed, by its name; None is "never".
Thresholds = Mapping[str, tuple[float | None, float | None]]


class Severity(enum.IntEnum):
    """The severity of a condition; also the exit code of the status command and the value of the metric."""

    OK = 0
    """The doctor has checked the subject of the condition, and has found no fault."""
    WARNING = 1
    """An operator should look at the condition, but outbox still meets all its guarantees."""
    CRITICAL = 2
    """Messages wait, or outbox may soon break one of its guarantees."""


class Concern(enum.StrEnum):
    """Why an operator should know a condition; the documents say which concerns are worth a page at night."""

    PUBLISHING = "publishing fails, or soon will"
    WAITING = "messages wait until an operator acts"
    UNDECIDED = "transactions stay undecided"
    LOSS = "a guarantee is broken, or data is lost"
    HANDLERS = "handlers fail in large numbers"
    DISK = "the disk fills"
    ON_PURPOSE = "an operator has caused them on purpose"
    PASSING = "they end by themselves, or when another system is back"
    WITHIN_DAYS = "look at them within days"

    @property
    def pages(self) -> bool:
        """Whether such a condition can become critical with the default thresholds."""
        return self not in (Concern.ON_PURPOSE, Concern.PASSING, Concern.WITHIN_DAYS)


class Symptom(enum.StrEnum):
    """What an operator sees: the section of docs/operations/index.md that has the next step of the condition."""

    START = "A worker does not start"
    PUBLISHING = "Publishing fails"
    WAITING = "Messages wait"
    STOPPED = "A queue is stopped"
    HANDLERS = "Handlers fail"
    UNDECIDED = "Transactions stay undecided"
    RESTORED = "A database was restored"
    DISK = "The disk is full"
    MISSING = "A message seems to be missing"


@dataclass(frozen=True, slots=True)
class Threshold:
    """The values from which a condition is a warning or critical; None means "never".

    A project changes them with OUTBOX["THRESHOLDS"]. `name` ends with the unit, or with the name of what is counted.
    """

    name: str
    warning: float | None
    critical: float | None
    unit: str
    meaning: str

    def judge(self, value: float | None, thresholds: Thresholds) -> Severity | None:
        """Return the severity of a value; None if the value is within both or unknown."""
        warning, critical = thresholds.get(self.name, (self.warning, self.critical))
        if value is None:
            return None
        if critical is not None and value >= critical:
            return Severity.CRITICAL
        if warning is not None and value >= warning:
            return Severity.WARNING
        return None


@dataclass(frozen=True, slots=True)
class Condition:
    """A condition that holds.

    `evidence` names at most twenty groups, queues, messages or sessions; `count` is the number of all of them.
    `is_unknown`: it could not be read whether the condition holds.
    """

    name: str
    severity: Severity
    evidence: Sequence[Fact] = ()
    count: int = 0
    meaning: str = ""
    next_step: str = ""
    is_unknown: bool = False

    @property
    def text(self) -> str:
        """The meaning and the first three facts, in one line."""
        facts = "; ".join(as_facts(fact) for fact in self.evidence[:3] if fact)
        more = f"; {self.count} in all" if facts and self.count > 3 else ""
        return f"{self.meaning} ({facts}{more})" if facts else self.meaning

    def as_json(self) -> dict[str, Any]:
        return {**dataclasses.asdict(self), "severity": self.severity.name.lower()}


@dataclass(frozen=True, slots=True)
class Counted:
    """What a rule has found if it does not list all of it: `count` is the number of all."""

    judged: Sequence[Judged]
    count: int


Rule = Callable[[State], Iterable[Judged] | Counted]


@dataclass(frozen=True, slots=True)
class Place:
    """A page of the operations pages, with the text of a link to it. `section`: the part of the page.

    `query` has a parameter of the page by name: the name of a fact, or after "=" a constant.
    """

    page: str
    link: str
    query: Mapping[str, str] = field(default_factory=dict)
    section: str = ""


@dataclass(frozen=True, slots=True)
class Remedy:
    """The button of an action, with the fields that a fact fills. `label` may name these fields in braces."""

    action: str
    label: str
    tone: str
    fields: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class Shown:
    """How the operations pages show a condition.

    `listed`: the list of what the condition is about, if there is one. `settled`: where one fact is settled, if not by
    a button. `settles`: the name of a fact of other conditions; such a fact is settled there, too. `figure`: the figure
    of the overview that gets the colour of the condition. `may_be_symptom`: it comes after the other conditions.
    """

    listed: Place | None
    settled: Place | None = None
    settles: str = ""
    remedies: Sequence[Remedy] = ()
    figure: str = ""
    may_be_symptom: bool = False


# Pages and actions that several conditions share.
NO_LIST: Final = Shown(listed=None)
INCIDENTS: Final = Place("incidents", "Incidents")
WORKERS: Final = Place("workers", "Workers")
BY_ERROR: Final = Place("dead_letters", "Dead letters by error")
OF_GROUP: Final = {"name": "group", "topic": "topic"}
PAUSE: Final = Remedy("pause", "Pause {group} …", "plain", {"group": "group"})
RESUME: Final = Remedy("resume", "Resume {group} …", "good", {"group": "group"})


@dataclass(frozen=True, kw_only=True, slots=True)
class DeclaredCondition(Generic[State]):
    """One condition: its texts, its thresholds, and the rule that finds it.

    `concern`: why it matters. `symptom`: what an operator sees.

    `subject`: the names of the facts that say what the condition is about, besides SUBJECT. Other facts are measured
    values, which differ from look to look, or single messages, which are too many: each change of a subject is reported
    once (signal `condition_changed`).

    `excuses`: conditions of which this one is the whole cause, so they leave out the groups that it names.

    `rule` gets the state of the broker, and returns facts with their severity; facts without a severity are left out.
    Without a rule, the code that meets the problem reports the condition.
    """

    name: str
    meaning: str
    next_step: str
    concern: Concern
    symptom: Symptom
    shown: Shown = NO_LIST
    thresholds: Sequence[Threshold] = ()
    subject: Sequence[str] = ()
    excuses: Sequence[str] = ()
    rule: Rule[State] | None = None

    def condition(self, severity: Severity, evidence: Sequence[Fact] = (), count: int = 0) -> Condition:
        """Return the condition with its texts."""
        return Condition(self.name, severity, evidence, count, self.meaning, self.next_step)

    def from_facts(self, found: Iterable[Judged] | Counted) -> list[Condition]:
        """Return a list with the condition, or an empty list if no fact has a severity. The worst fact comes first."""
        facts = found.judged if isinstance(found, Counted) else found
        bad = [(severity, fact) for severity, fact in facts if severity]
        if not bad:
            return []
        bad.sort(key=lambda one: -one[0])
        count = found.count if isinstance(found, Counted) else len(bad)
        return [self.condition(bad[0][0], [fact for _, fact in bad[:EVIDENCE]], count)]

    def evaluate(self, state: State, excused: Container[object] = ()) -> list[Condition]:
        """Return a list with the condition if it holds, else an empty list. `excused`: groups to leave out."""
        found = self.rule(state) if self.rule else []
        if not isinstance(found, Counted):
            found = [(severity, fact) for severity, fact in found if fact.get("group") not in excused]
        return self.from_facts(found)


class Declarations(dict[str, DeclaredCondition[State]]):
    """Declared conditions by name."""

    def declare(self, **declared: Any) -> Callable[[Rule[State]], Rule[State]]:
        """Declare the condition that the decorated rule finds, and that has its name."""

        def add(rule: Rule[State]) -> Rule[State]:
            self.add(DeclaredCondition(name=rule.__name__, rule=rule, **declared))
            return rule

        return add

    def add(self, one: DeclaredCondition[State]) -> DeclaredCondition[State]:
        assert one.name not in self, f"condition {one.name} is declared twice"
        self[one.name] = one
        return one

    def evaluate(self, state: State) -> Iterator[Condition]:
        for one in self.values():
            yield from one.evaluate(state)


@dataclass(frozen=True, slots=True)
class ConditionReport:
    """All conditions that hold, the worst first; if the broker did not answer, `is_complete` is False."""

    conditions: Sequence[Condition]
    is_complete: bool = True

    @property
    def severity(self) -> Severity:
        return max((condition.severity for condition in self.conditions), default=Severity.OK)

    @property
    def is_healthy(self) -> bool:
        """Whether no condition holds and the report is complete."""
        return self.is_complete and not self.severity

    @property
    def problems(self) -> list[str]:
        """The conditions in words, for a probe."""
        return [one.text for one in self.conditions if one.severity]

    def as_json(self) -> dict[str, Any]:
        return {
            "severity": self.severity.name.lower(),
            "complete": self.is_complete,
            "conditions": [condition.as_json() for condition in self.conditions],
        }


def fact_of(row: object, *names: str, **more: str | float | None) -> Fact:
    """Return the attributes of a row that have these names, and then `more`, as a fact."""
    return {**{name: getattr(row, name) for name in names}, **more}


def of_text(name: str, severity: Severity, meaning: str, next_step: str = "") -> Condition:
    """Return a condition that is declared nowhere, with its own texts."""
    return Condition(name, severity, meaning=meaning, next_step=next_step)


def of_check(name: str, is_well: bool, text: str, remedy: str, bad: Severity = Severity.CRITICAL) -> Condition:
    """Return the result of one check of the doctor: OK if all is well, else `bad` with the remedy as next step."""
    return of_text(name, Severity.OK, text) if is_well else of_text(name, bad, text, remedy)


def unknown(name: str, error: Exception) -> Condition:
    """Return a warning that it is unknown whether the condition `name` holds, because of this error."""
    meaning = "It is unknown whether this condition holds, because its tables could not be read."
    step = "Correct the error; the next look reads the tables again."
    facts: list[Fact] = [{"error": str(error).strip()}]
    return Condition(name, Severity.WARNING, facts, 1, meaning=meaning, next_step=step, is_unknown=True)


def worst_first(conditions: Iterable[Condition], *, is_complete: bool = True) -> ConditionReport:
    """Return the report of these conditions, the worst first."""
    return ConditionReport(sorted(conditions, key=lambda one: (-one.severity, one.name)), is_complete)


def duration(seconds: float | None) -> str:
    """Return a readable time span; '' for None."""
    if seconds is None:
        return ""
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"


def as_facts(fact: Fact) -> str:
    """Return one fact of the evidence in one line, with readable time spans, and only the beginning of an error."""
    return ", ".join(f"{name.removesuffix('_seconds')} {_readable(name, value)}" for name, value in fact.items())


def _readable(name: str, value: object) -> object:
    if name.endswith("seconds") and isinstance(value, (int, float)):
        return duration(value)
    if value in (None, ""):
        return "-"
    if name not in _TEXTS_OF_OTHERS or not isinstance(value, str):
        return value
    # The error of a handler may have many long lines, and the facts after it would be out of sight.
    first = next(iter(for_people(value).splitlines()), "-")
    return first if len(first) <= _SHOWN else f"{first[: _SHOWN - 1]}…"
