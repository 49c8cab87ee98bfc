"""Judges a history by its lines, the business tables and the effects. It knows nothing else of the product.

Each rule is a function from `History` to the sentences that say what is broken. A rule that cannot decide (a process
was killed between its act and its line) claims nothing.
"""

from __future__ import annotations

import ast
import json
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

Line = dict[str, Any]
Found = Iterator[str]

LONGEST_BLOCK = 10.0  # seconds
# The groups that owe one effect to each message of a topic. `books` owes one to each effect of `bill`.
GROUPS = {"orders": ("ship", "points", "charge", "mail", "bill"), "steps": ("track",), "later": ("remind",)}


@dataclass(frozen=True)
class Tables:
    """What the business tables contain when all is over."""

    orders: set[str] = field(default_factory=set)
    # (group, name, number), in the order in which they were written.
    effects: Sequence[tuple[str, str, int]] = ()
    # name -> (refused, reserved, confirmed)
    bookings: dict[str, tuple[bool, int, int]] = field(default_factory=dict)


@dataclass(frozen=True)
class History:
    """What happened, and what it left."""

    lines: Sequence[Line]
    tables: Tables

    def of(self, event: str) -> list[Line]:
        """The lines of one kind."""
        return self._by_event.get(event, [])

    @cached_property
    def _by_event(self) -> dict[str, list[Line]]:
        found: dict[str, list[Line]] = defaultdict(list)
        for line in self.lines:
            found[line["event"]].append(line)
        return found

    @cached_property
    def tries(self) -> dict[str, Line]:
        """The line before each business row."""
        return {line["name"]: line for line in self.of("try")}

    @cached_property
    def refused(self) -> set[str]:
        """The names whose publish call raised."""
        return {line["name"] for line in self.of("refused")}

    @cached_property
    def effects(self) -> Counter[tuple[str, str]]:
        """How often each effect is there."""
        return Counter((group, name) for group, name, _ in self.tables.effects)

    def is_undone(self, line: Line) -> bool:
        """Whether a restore may have taken back what this line says."""
        return any(one["dumped_at"] <= line["at"] <= one["at"] for one in self.of("restored"))

    def is_forgotten(self, line: Line) -> bool:
        """Whether the broker, restored alone, may have forgotten a message that this line is about."""
        # A block that was open during the dump has published after it.
        return any(one["dumped_at"] - LONGEST_BLOCK <= line["at"] <= one["at"] for one in self.of("broker_restored"))

    @cached_property
    def forgotten(self) -> set[str]:
        """The names whose message, or a message that its handlers published, the broker may have forgotten."""
        events = ("try", "book", "saga", "begin")
        return {line["name"] for event in events for line in self.of(event) if self.is_forgotten(line)}

    def delivered(self, name: str) -> bool:
        """Whether any group has handled the message."""
        return any((group, name) in self.effects for group in GROUPS[self.tries[name]["topic"]])

    def struck(self, at: float, kinds: set[str], within: float) -> bool:
        """Whether one of these faults was at work in so many seconds before."""
        return any(line["kind"] in kinds and at - within <= line["at"] <= at for line in self.of("fault"))


# -- messages and effects ---------------------------------------------------------------------------------------


def lost(history: History) -> Found:
    """A committed row has one message, and each group handles it."""
    for name in sorted(history.tables.orders):
        attempt = history.tries[name]
        by_hand = name in history.refused and attempt["by_hand"]
        if attempt["unique"] or by_hand or history.is_forgotten(attempt):
            continue
        missing = [group for group in GROUPS[attempt["topic"]] if (group, name) not in history.effects]
        if missing:
            refused = "; its publish call was refused" if name in history.refused else ""
            yield f"the row {name} of {attempt['topic']} has no effect of {', '.join(missing)}{refused}"
    for group, name in history.effects:
        if group == "bill" and ("books", name) not in history.effects and name not in history.forgotten:
            yield f"{name} was billed, and its invoice is not in the books"


def named(history: History) -> Found:
    """If the broker alone was restored, `compare` counts what it has forgotten; else it finds nothing."""
    rows = {line["name"] for line in history.of("published")} & history.tables.orders
    gone = []
    for restored in history.of("broker_restored"):
        dumped = min(line["at"] for line in history.of("dumped") if line["at"] > restored["dumped_at"])
        gone += [name for name in rows if dumped < history.tries[name]["at"] < restored["at"]]
    for line in history.of("compared"):
        if line["code"] not in ((0, 2) if history.of("broker_restored") else (0,)):
            yield f"compare ended with {line['code']}: {(line['text'] + line['errors'])[-600:]}"
            continue
        found = json.loads(line["text"])["found"]
        count = sum(one["missing"] for one in found if one["kind"] == "ledger")
        if len(gone) > count:
            yield f"the broker has forgotten {len(gone)} messages, and compare has found {count}: {sorted(gone)}"


def phantom(history: History) -> Found:
    """An effect needs its row."""
    for group, name in sorted(history.effects):
        if group == "books":
            if ("bill", name) not in history.effects:
                yield f"the invoice {name} is in the books, and was never billed"
        elif name not in history.tables.orders:
            yield f"{group} handled {name}, whose row was never committed"
    for line in history.of("begin"):
        if line["group"] != "books" and line["name"] not in history.tables.orders and not history.is_undone(line):
            yield f"{line['group']} was called for {line['name']}, whose row was never committed"


def twice(history: History) -> Found:
    """No effect happens twice."""
    for (group, name), count in sorted(history.effects.items()):
        if count > 1:
            yield f"{group} handled {name} {count} times"


def silent(history: History) -> Found:
    """A block that returned has committed its rows."""
    for line in history.of("committed"):
        if not line["by_hand"] and not history.is_undone(line):
            for name in line["names"]:
                if name not in history.tables.orders:
                    yield f"{line['program']} returned, and its row {name} is not there"


def order(history: History) -> Found:
    """The effects of a key come in the order of the commits of its rows."""
    last: dict[str, int] = {}
    for group, name, number in history.tables.effects:
        if group == "track" and name in history.tries:
            key = history.tries[name]["key"]
            if number <= last.get(key, 0):
                yield f"track handled {name}, number {number} of {key}, after number {last[key]}"
            last[key] = max(number, last.get(key, 0))


def early(history: History) -> Found:
    """A delayed message is not delivered before its time."""
    for line in history.of("begin"):
        if line["group"] == "remind" and line["at"] < line["due"]:
            yield f"remind got {line['name']} {line['due'] - line['at']:.3f} s early"


def unique(history: History) -> Found:
    """Of the committed rows of a unique key, one has its message."""
    rows: dict[str, list[str]] = defaultdict(list)
    for name, attempt in history.tries.items():
        if attempt["unique"] and name in history.tables.orders:
            rows[attempt["unique"]].append(name)
    for key, names in sorted(rows.items()):
        if any(history.is_forgotten(history.tries[name]) for name in names):
            continue
        delivered = [name for name in names if history.delivered(name)]
        if len(delivered) != 1:
            yield f"unique key {key}: of the rows {names}, these were delivered: {delivered}"
        for name in delivered:
            missing = [group for group in GROUPS["orders"] if (group, name) not in history.effects]
            if missing:
                yield f"unique key {key}: {name} has no effect of {', '.join(missing)}"


def charge(history: History) -> Found:
    """The provider acts once per order: all calls for it have the same key."""
    keys: dict[str, set[str]] = defaultdict(set)
    for line in history.of("charge"):
        if line["name"] in history.tables.orders or not history.is_undone(line):
            keys[line["name"]].add(line["key"])
    for name, some in sorted(keys.items()):
        if len(some) > 1:
            yield f"{name} was charged with {len(some)} different keys"
        if name not in history.tables.orders:
            yield f"{name} was charged, and its row was never committed"


class Interval(NamedTuple):
    """A call of a limited handler."""

    begin: float
    end: float
    name: str


def limit(history: History) -> Found:
    """No more calls at once than the limit. What was frozen, or ran while the server crashed, may overlap once."""
    ends: dict[tuple[int, str], list[float]] = defaultdict(list)
    for line in history.lines:
        if line["event"] in ("end", "fail") and line["group"] == "mail":
            ends[line["pid"], line["name"]].append(line["at"])
    # A process stands still, and the server is gone, within half a second of the line that says so.
    harmless = ("kill", "kill worker", "snapshot held")
    excuses = [(line["at"], line.get("victim")) for line in history.of("fault") if line["kind"] not in harmless]
    calls = []
    for line in history.of("begin"):
        if line["group"] != "mail":
            continue
        # Of a call whose process was killed, only its begin is known.
        end = min((at for at in ends[line["pid"], line["name"]] if at >= line["at"]), default=line["at"] + 1e-6)
        cut = [at for at, victim in excuses if line["at"] - 0.5 <= at <= end and victim in (None, line["pid"])]
        if not cut:
            calls.append(Interval(line["at"], end, line["name"]))
    allowed = max((line["limit"] for line in history.of("begin") if line["group"] == "mail"), default=0)
    moments = sorted([(call.begin, 1, call) for call in calls] + [(call.end, -1, call) for call in calls])
    running: set[Interval] = set()
    for _, change, call in moments:
        (running.add if change > 0 else running.discard)(call)
        if len(running) > allowed:
            yield f"{len(running)} calls of mail at once: {sorted(one.name for one in running)}"
            return


def saga(history: History) -> Found:
    """A booking ends confirmed once, or with its reservation given back."""
    for name, (refused, reserved, confirmed) in sorted(history.tables.bookings.items()):
        if name not in history.forgotten and (reserved, confirmed) != ((0, 0) if refused else (1, 1)):
            yield f"the booking {name} (refused: {refused}) has reserved {reserved} and confirmed {confirmed}"


def conserved(history: History) -> Found:
    """The audit agrees at the end."""
    for line in history.of("audit"):
        if line["code"] != 0:
            yield f"the audit ended with {line['code']}: {line['text'][-600:]}"


# -- the truth of the status ------------------------------------------------------------------------------------

# Faults that a `@fault` names together.
_TOGETHER = {
    "away": {"crash of the server", "sessions exhausted", "sessions ended", "connections cut"},
    "deaths": {"kill", "kill worker", "freeze", "dump", "restore", "restore of the broker"},
}
_FAULTS = Path(__file__).resolve().parent.parent / "django"


def explained() -> dict[str, tuple[set[str], float]]:
    """Which faults of a storm explain a condition, and for how many seconds.

    Each `@fault` of tests/django says it. These files are read and not imported, because they import the insides of
    the product. A condition that is not here is never so in a storm.
    """
    found = {}
    for path in sorted(_FAULTS.glob("faults*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for function in (one for one in tree.body if isinstance(one, ast.FunctionDef)):
            for call in function.decorator_list:
                given = {one.arg: ast.literal_eval(one.value) for one in getattr(call, "keywords", ())}
                if "storms" in given:
                    kinds = set().union(*(_TOGETHER.get(one, {one}) for one in given["storms"]))
                    found[function.name] = (kinds, given["seconds"])
    return found


EXPLAINED = explained()


def conditions(line: Line) -> list[Line]:
    """The conditions of a status line, without what only informs."""
    found = line["answer"].get("conditions", [])
    return [one for one in found if one["severity"] in ("warning", "critical")]


def untrue(history: History) -> Found:
    """The status names no condition that is not so."""
    starting = min((line["at"] for line in history.of("try")), default=0) + 30
    failed = history.of("fail")
    # The handlers of the shop fail by themselves, and explain these without a fault.
    causes = {
        "dead_letters": [one["at"] for one in failed if one["group"] == "audit"],
        "failing_messages": [one["at"] for one in failed],
    }
    for line in history.of("status"):
        if "unreadable" in line["answer"]:
            yield f"the status gave no JSON, exit code {line['code']}: {line['answer']['errors'][-600:]}"
            continue
        for one in conditions(line):
            name = one["name"]
            # What the status could not read, it names as unknown.
            kinds, within = EXPLAINED.get("unreachable" if one.get("is_unknown") else name, (set(), 0.0))
            if name in causes:
                explained = any(at <= line["at"] for at in causes[name])
            else:
                explained = history.struck(line["at"], kinds, within + line["at"] - line["began"]) or (
                    bool(kinds) and line["at"] < starting
                )
            if not explained:
                yield f"the status says {name}, and nothing explains it: {str(one)[:600]}"


def unseen(history: History) -> Found:
    """The status names what is so: a dead letter at the end, and a server that is away at once."""
    statuses = history.of("status")
    failed = [line for line in history.of("fail") if line["group"] == "audit"]
    kept = [line for line in failed if not history.is_undone(line) and not history.is_forgotten(line)]
    given_up = {line["name"] for line in kept} & history.tables.orders
    if statuses and given_up and "dead_letters" not in {one["name"] for one in conditions(statuses[-1])}:
        yield f"{len(given_up)} messages were given up, and the last status has no dead_letters"
    ups = [line["at"] for line in history.of("server_up")]
    for fault in history.of("fault"):
        if fault["kind"] == "crash of the server":
            up = min((at for at in ups if at > fault["at"]), default=0.0)
            for line in statuses:
                if fault["at"] + 0.5 < line["began"] and line["at"] < up and line["code"] == 0:
                    yield f"the status was green at {line['at']:.1f}, while the server was away"


RULES = (lost, named, phantom, twice, silent, order, early, unique, charge, limit, saga, conserved, untrue, unseen)


def check(lines: Sequence[Line], tables: Tables) -> list[str]:
    """Everything that is broken, each with the name of its rule."""
    history = History(lines, tables)
    return [f"{rule.__name__}: {sentence}" for rule in RULES for sentence in rule(history)]


def missing_effects(lines: Sequence[Line], tables: Tables) -> int:
    """How many effects are still to come, so that a storm knows when it is over."""
    history = History(lines, tables)
    return sum(1 for rule in (lost, unique, saga) for _ in rule(history))
