"""Each rule of the checker finds what breaks it, and nothing in a history that breaks nothing."""

from __future__ import annotations

import ast
import json
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.oracle.__main__ import judged, keep, kept, main
from tests.oracle.checker import GROUPS, RULES, Tables, check
from tests.oracle.faulty import PATCHES, ROOT
from tests.oracle.storm import Outcome, Plan

Line = dict[str, Any]
MAKERS: list[tuple[str, Callable[[Built], None]]] = []


class Built:
    """A correct history, which a test then breaks."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.lines: list[Line] = []
        self.orders: set[str] = set()
        self.effects: list[tuple[str, str, int]] = []
        self.bookings = {"b1": (False, 1, 1), "b2": (True, 0, 0)}
        for name in ("a", "b"):
            self.commit(name, "orders", key="k")
        self.commit("s1", "steps", key="s", number=1)
        self.commit("s2", "steps", key="s", number=2)
        self.commit("d", "later")
        self.commit("u1", "orders", unique="u")
        self.write("try", name="u2", topic="orders", unique="u", by_hand=False, key=None)
        self.write("duplicate", name="u2", of="x")
        self.orders.add("u2")
        self.write("try", name="undone", topic="orders", unique=None, by_hand=False, key=None)
        self.write("status", began=self.now, code=0, answer={"severity": "ok", "conditions": []})
        self.write("audit", code=0, text="", errors="")
        self.compared(0)

    def write(self, event: str, **fields: Any) -> None:
        self.now += 1
        self.lines.append({"event": event, "at": self.now, "pid": 1, **fields})

    def call(self, group: str, name: str, **fields: Any) -> None:
        self.write("begin", group=group, name=name, attempt=1, **fields)
        self.write("end", group=group, name=name)

    def commit(self, name: str, topic: str, *, key: str = "", unique: str | None = None, number: int = 0) -> None:
        self.write("try", name=name, topic=topic, unique=unique, by_hand=False, key=key)
        self.write("published", name=name, id=name)
        self.write("committed", names=[name], program="commit", by_hand=False)
        self.orders.add(name)
        for group in (*GROUPS[topic], *(["books"] if topic == "orders" else [])):
            more: dict[str, dict[str, Any]] = {"mail": {"limit": 1}, "remind": {"due": self.now}}
            self.call(group, name, **more.get(group, {}))
            self.effects.append((group, name, number))
        if topic == "orders":
            self.write("charge", name=name, key=name)

    def condition(self, name: str, **more: bool) -> None:
        found = [{"name": name, "severity": "critical", **more}]
        self.write("status", began=self.now, code=2, answer={"severity": "critical", "conditions": found})

    def compared(self, missing: int) -> None:
        found = [{"kind": "ledger", "missing": missing}] if missing else []
        self.write("compared", code=2 if found else 0, text=json.dumps({"found": found}), errors="")

    def forget(self, name: str) -> None:
        """A row whose message the broker has forgotten."""
        dumped_at = self.now
        self.write("dumped", done=True)
        self.commit(name, "orders", unique=f"unique of {name}" if name == "g2" else None)
        self.write("broker_restored", dumped_at=dumped_at)
        self.effects = [effect for effect in self.effects if effect[1] != name]

    def judged(self) -> set[str]:
        found = check(self.lines, Tables(self.orders, self.effects, self.bookings))
        return {sentence.partition(":")[0] for sentence in found}


def breaks(rule: str) -> Callable[[Callable[[Built], None]], Callable[[Built], None]]:
    """The function breaks a correct history in a way that this rule must find."""

    def add(maker: Callable[[Built], None]) -> Callable[[Built], None]:
        MAKERS.append((rule, maker))
        return maker

    return add


@breaks("lost")
def _no_effect(built: Built) -> None:
    built.effects.remove(("ship", "a", 0))


@breaks("lost")
def _no_invoice(built: Built) -> None:
    built.effects.remove(("books", "a", 0))


@breaks("lost")
def _a_row_whose_publish_was_refused(built: Built) -> None:
    built.write("try", name="r", topic="orders", unique=None, by_hand=False, key=None)
    built.write("refused", name="r", error="SendFailed")
    built.orders.add("r")


@breaks("named")
def _a_forgotten_message_that_nothing_names(built: Built) -> None:
    built.forget("g")
    built.forget("g2")
    built.compared(1)


@breaks("named")
def _a_finding_without_a_restore(built: Built) -> None:
    built.compared(1)


@breaks("phantom")
def _an_effect_without_a_row(built: Built) -> None:
    built.effects.append(("ship", "undone", 0))


@breaks("phantom")
def _a_call_without_a_row(built: Built) -> None:
    built.call("ship", "undone")


@breaks("twice")
def _a_second_effect(built: Built) -> None:
    built.effects.append(("points", "b", 0))


@breaks("silent")
def _a_block_that_returned(built: Built) -> None:
    built.write("committed", names=["undone"], program="decorated", by_hand=False)


@breaks("order")
def _a_swapped_pair(built: Built) -> None:
    first, second = [place for place, effect in enumerate(built.effects) if effect[0] == "track"]
    built.effects[first], built.effects[second] = built.effects[second], built.effects[first]


@breaks("early")
def _before_its_time(built: Built) -> None:
    built.call("remind", "d", due=built.now + 10)


@breaks("unique")
def _both_of_a_unique_key(built: Built) -> None:
    built.effects += [(group, "u2", 0) for group in (*GROUPS["orders"], "books")]


@breaks("unique")
def _none_of_a_unique_key(built: Built) -> None:
    built.effects = [effect for effect in built.effects if effect[1] != "u1"]


@breaks("charge")
def _another_key(built: Built) -> None:
    built.write("charge", name="a", key="another")


@breaks("limit")
def _two_at_once(built: Built) -> None:
    built.write("begin", group="mail", name="a", attempt=2, limit=1)
    built.call("mail", "b", limit=1)
    built.write("end", group="mail", name="a")


@breaks("saga")
def _a_reservation_that_stays(built: Built) -> None:
    built.bookings["b2"] = (True, 1, 0)


@breaks("conserved")
def _an_audit_that_disagrees(built: Built) -> None:
    built.write("audit", code=1, text="orders: sent 5, found 4", errors="")


@breaks("untrue")
def _a_condition_that_is_not_so(built: Built) -> None:
    built.condition("lost_effects")


@breaks("untrue")
def _a_dead_letter_that_is_none(built: Built) -> None:
    built.condition("dead_letters")


@breaks("untrue")
def _an_unknown_condition_without_a_fault(built: Built) -> None:
    built.condition("reconciliation_findings", is_unknown=True)


@breaks("untrue")
def _a_fault_of_long_ago(built: Built) -> None:
    built.write("fault", kind="connections cut", count=1)
    built.now += 600
    built.condition("unreachable")


@breaks("phantom")
def _a_call_that_no_restore_explains(built: Built) -> None:
    dumped_at = built.now
    built.write("restored", dumped_at=dumped_at)
    built.call("ship", "undone")


@breaks("lost")
def _an_effect_that_a_restore_took(built: Built) -> None:
    built.write("restored", dumped_at=built.now - 1)
    built.effects.remove(("ship", "a", 0))


@breaks("unseen")
def _a_dead_letter_that_nothing_names(built: Built) -> None:
    built.write("fail", group="audit", name="a", error="PermanentError")
    built.write("status", began=built.now, code=0, answer={"severity": "ok", "conditions": []})


@breaks("unseen")
def _green_without_a_server(built: Built) -> None:
    built.write("fault", kind="crash of the server")
    built.now += 1
    built.write("status", began=built.now, code=0, answer={"severity": "ok", "conditions": []})
    built.write("server_up")


def test_a_correct_history_breaks_nothing() -> None:
    assert Built().judged() == set()


@pytest.mark.parametrize(("rule", "breaking"), [pytest.param(*one, id=one[1].__name__) for one in MAKERS])
def test_a_rule_finds_what_breaks_it(rule: str, breaking: Callable[[Built], None]) -> None:
    built = Built()
    breaking(built)
    assert rule in built.judged()


def test_every_rule_has_something_that_breaks_it() -> None:
    assert {rule for rule, _ in MAKERS} == {rule.__name__ for rule in RULES}


def test_what_an_interruption_leaves_open_is_not_claimed() -> None:
    """A killed client, a publish call refused after a COMMIT by hand, a killed call, a frozen call over the limit."""
    built = Built()
    built.write("begin", group="mail", name="u1", attempt=2, limit=1)
    built.write("fault", kind="kill", victim=1)
    built.call("mail", "a", limit=1)
    built.write("try", name="killed", topic="orders", unique=None, by_hand=False, key=None)
    built.write("try", name="by hand", topic="orders", unique=None, by_hand=True, key=None)
    built.write("refused", name="by hand", error="TransactionUsageError")
    built.orders.add("by hand")
    built.write("begin", group="mail", name="a", attempt=2, limit=1)
    built.write("fault", kind="sessions exhausted", count=1)
    built.condition("reconciliation_findings", is_unknown=True)
    built.write("fault", kind="freeze", victim=1)
    built.now += 10
    built.call("mail", "b", limit=1)
    built.write("end", group="mail", name="a")
    assert built.judged() == set()


def test_what_a_restore_has_taken_back_is_not_claimed() -> None:
    """A block that returned, its handlers and its charge, a message given up: their rows are of after the dump."""
    built = Built()
    dumped_at = built.now
    built.commit("gone", "orders")
    built.write("charge", name="gone", key="another")
    built.write("fail", group="audit", name="gone", error="PermanentError")
    built.write("restored", dumped_at=dumped_at)
    built.write("status", began=built.now, code=0, answer={"severity": "ok", "conditions": []})
    built.orders.remove("gone")
    built.effects = [effect for effect in built.effects if effect[1] != "gone"]
    assert built.judged() == set()


def test_what_the_broker_has_forgotten_is_not_claimed_if_it_is_named() -> None:
    built = Built()
    built.lines = [line for line in built.lines if line["event"] != "compared"]
    built.forget("g")
    built.forget("g2")
    built.compared(2)
    assert built.judged() == set()


def test_a_kept_history_is_judged_again_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built = Built()
    _a_second_effect(built)
    folder = tmp_path / "storm7"
    (folder / "lines").mkdir(parents=True)
    text = "\n".join(json.dumps(line) for line in built.lines)
    (folder / "lines" / "1.jsonl").write_text(text, encoding="utf-8")
    tables = Tables(built.orders, built.effects, built.bookings)
    outcome = Outcome(Plan(seed=7), built.lines, tables, folder, settled=False)
    problems = judged(outcome)
    assert [sentence.partition(":")[0] for sentence in problems] == ["settled", "twice"]
    assert kept(keep(outcome, problems, tmp_path / "kept"))[1] == problems
    monkeypatch.setattr("sys.argv", ["oracle", "--check", str(tmp_path / "kept" / "storm7")])
    assert main() == 1


PUBLIC = {"outbox", "outbox.contrib.django", "outbox.contrib.unique", "outbox.errors"}


def imported(path: Path) -> Iterator[str]:
    """What a module imports of the product."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        for name in names:
            if name.split(".")[0] == "outbox":
                yield from (
                    [f"{name}.{alias.name}" for alias in node.names] if isinstance(node, ast.ImportFrom) else [name]
                )


def test_the_oracle_imports_public_names_only() -> None:
    """Those of docs/maintainers/names.md, which another test compares with the product."""
    root = Path(__file__).parent
    public = (root.parents[1] / "docs" / "maintainers" / "names.md").read_text(encoding="utf-8")
    for path in [*root.glob("*.py"), *root.glob("shop/*.py")]:
        for name in imported(path):
            home, _, last = name.rpartition(".")
            known = f"`{name}`" in public or (home in PUBLIC and f"`{last}`" in public) or f"`{home}.{last}." in public
            assert known or name in ALSO_DOCUMENTED, f"{path.name} imports {name}, which names.md does not list"


# Named by the pages of docs/ as what a project imports: the quick start, and the page about Celery.
ALSO_DOCUMENTED = {
    "outbox.contrib.django.databases.database_from_url",
    "outbox.contrib.django.celery",
    "outbox.broker.embedded",
}


def test_each_planted_fault_can_be_planted() -> None:
    """A patch that does not apply any more would only be missed when somebody runs it."""
    patches = sorted(PATCHES.glob("*.patch"))
    assert len(patches) == 12
    for patch in patches:
        done = subprocess.run(["git", "apply", "--check", str(patch)], cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, f"{patch.name}: {done.stderr}"
