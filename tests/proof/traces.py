"""Recorded storms as runs of the models: `python -m tests.proof.traces` records two storms and replays them.

A trace has what happened to one transaction (`ledger`), or to three messages of one queue and group (`lease`): what the
database committed about it, in the order of the commits, and for a transaction also what its client wrote down. Spin
searches a run of the model that makes these steps in this order, and any of the steps that leave no mark. A trace
without such a run is a finding: the code or the model is wrong.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from tests.oracle.storm import Plan
from tests.proof import models
from tests.proof.recording import Change, History, RecordedServer, Row, record

# The models as the traces need them: bounds that no trace reaches. Four processes may own a queue in a trace.
OWNERS: Final = 4
CLAIMS: Final = 6
BOUNDS: Final[Mapping[str, Sequence[str]]] = {
    "ledger": (),
    "lease": ("OFFSETS_LATER", "N=3", "SPAN=3", f"CONSUMERS={OWNERS}", "ENDS=9", "DEATHS=0"),
    "tick": ("N=3",),
    "claim": ("STEPS=1", f"WORKERS={CLAIMS}", "DEATHS=9", "FREEZES=9"),
}
MESSAGES: Final = 3
# Handlers that write their effect in the transaction of their inbox row, once for each message that they get.
GROUPS: Final = ("ship", "points", "mail", "bill", "books", "track", "remind")
_ANYBODY: Final = 9

# A step that no model has.
_STRANGE: Final = 99
_MOST_STEPS: Final = 250


@dataclass(frozen=True, slots=True)
class Step:
    """A word of a model, the number of an actor, and one more number."""

    word: str
    actor: int = 0
    number: int = 0

    def __str__(self) -> str:
        return f"{self.word} {self.actor} {self.number}"

    @staticmethod
    def read(text: str) -> Step:
        """The step of a text that `str` has made."""
        word, actor, number = text.split()
        return Step(word, int(actor), int(number))


@dataclass(frozen=True, slots=True)
class Trace:
    """What the database has committed, and what one process has written down. `about`: the transaction or messages."""

    about: str
    database: Sequence[Step]
    process: Sequence[Step] = ()

    def __str__(self) -> str:
        """The steps of the database, and behind a semicolon those of the process, if there are any."""
        return "; ".join(", ".join(map(str, steps)) for steps in (self.database, self.process) if steps)

    @staticmethod
    def read(about: str, text: str) -> Trace:
        """The trace of a text that `str` has made."""
        lists = [[Step.read(one) for one in part.split(",") if one.strip()] for part in text.split(";")]
        return Trace(about, *lists)


# -- replaying -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Replay:
    """The traces that are no run of their model, and how many different traces there were."""

    refused: Sequence[str]
    different: int


def replay(model: str, traces: Iterable[Trace]) -> Replay:
    """Replay traces; a sentence for each that is refused. Raises RuntimeError if the model itself fails."""
    names: dict[str, list[str]] = defaultdict(list)
    by_text = {}
    for trace in traces:
        names[str(trace)].append(trace.about)
        by_text[str(trace)] = trace
    program, words = Path(_built(model).name) / "pan", _words(model)
    refused = []
    for text, trace in by_text.items():
        if not _is_run(program, words, trace):
            about = f"{names[text][0]} and {len(names[text]) - 1} others" if names[text][1:] else names[text][0]
            refused.append(f"{about}: {text}. {_where(program, words, trace)}")
    return Replay(refused, len(by_text))


@functools.cache
def _built(model: str) -> tempfile.TemporaryDirectory[str]:
    """The folder of a model's program; it exists as long as this process."""
    folder = tempfile.TemporaryDirectory(prefix="outbox-traces-")
    # A step of C in the model can depend on any other step, so the search leaves none out.
    models.build(Path(folder.name), model, ["TRACE", *BOUNDS[model]], "-DNOREDUCE")
    return folder


def _where(program: Path, words: Mapping[str, int], trace: Trace) -> str:
    """The step of the database at which the model stops, whatever the process has done until then."""
    for count in range(1, len(trace.database) + 1):
        parts = [Trace("", trace.database[:count], trace.process[:some]) for some in range(len(trace.process) + 1)]
        if not any(_is_run(program, words, part) for part in parts):
            return f"The model does not get past step {count} of the database."
    return "What the database has committed is a run, but not together with what the process wrote."


def _words(model: str) -> dict[str, int]:
    """The numbers of a model's words."""
    text = (models.FOLDER / f"{model}.pml").read_text(encoding="utf-8")
    return {word: int(number) for word, number in re.findall(r"^#define ([A-Z_]+) (\d+)$", text, re.MULTILINE)}


def _is_run(program: Path, words: Mapping[str, int], trace: Trace) -> bool:
    """Whether the model can make the steps of a trace."""

    def encoded(steps: Sequence[Step]) -> str:
        numbers = [words.get(one.word, _STRANGE) * 100 + one.actor * 10 + one.number for one in steps]
        return " ".join(map(str, [*numbers, 0]))

    assert max(len(trace.database), len(trace.process)) <= _MOST_STEPS
    variables = os.environ | {"TRACE": f"{encoded(trace.database)} {encoded(trace.process)}"}
    command = [str(program), "-E", "-m200000", "-w20"]
    text = subprocess.run(command, cwd=program.parent, env=variables, check=True, capture_output=True, text=True).stdout
    failed = re.search(r"assertion violated (.+) \(at depth", text)
    if failed is None and ("Search not completed" in text or "max search depth too small" in text):
        raise RuntimeError(f"not all states were visited:\n{text}")
    if failed is not None and "is_run" not in failed[1]:
        raise RuntimeError(f"the model itself fails, at {failed[1]}: {trace}")
    return failed is not None


# -- transactions --------------------------------------------------------------------------------------------------


def _bodies(history: History) -> Iterator[tuple[Row, str]]:
    """The stored messages, each with the name in its body."""
    for change in history.changes:
        if change.table == "commit_log" and not change.is_delete:
            body = json.loads(bytes.fromhex(str(change.row["body"])[2:]))
            yield change.row, str(body.get("name"))


def of_ledger(history: History) -> list[Trace]:
    """The two-phase transactions of a storm: one trace for each."""
    database: dict[str, list[Step]] = defaultdict(list)
    process: dict[str, list[Step]] = defaultdict(list)
    for change in history.changes:
        step = _of_transaction(change)
        transaction = str(change.row.get("subject" if change.table == "incident" else "transaction_id"))
        # A half message may have several rows, and the row of a parked transaction changes again.
        if step is not None and not (step.word in ("HALF", "PARKED") and step in database[transaction]):
            database[transaction].append(step)
    for line in history.lines:
        if line["event"] == "step" and (step := _of_client(line)) is not None:
            process[line["transaction"]].append(step)
    return [
        Trace(transaction, steps, process.get(transaction, []))
        for transaction, steps in database.items()
        # An atomic transaction has a decision only.
        if any(step.word != "DECIDED" for step in steps)
    ]


def _of_transaction(change: Change) -> Step | None:
    row = change.row
    match change.table:
        case "outbox_ledger" if change.is_delete:
            return Step("PRUNED")
        case "outbox_ledger":
            return Step("COMMITTED" if row["state"] == "C" else "TOMBSTONE")
        case "commit_log" if row["half"] == "t":
            return Step("HALF")
        case "op_log" if not change.is_delete:
            return Step("DECIDED", "PKO".index(str(row["decided_by"])), int(row["decision"] == "C"))
        case "pending_check" if row["parked_at"] is not None:
            return Step("PARKED")
        case "incident" if row["kind"] in ("contradicted", "refused"):
            return Step("CONTRADICTED")
        case _:
            return None


def _of_client(line: Mapping[str, object]) -> Step | None:
    match line["point"]:
        case "producer.after_ledger":
            return Step("ROW")
        case "producer.after_local_commit":
            return Step("ANSWERED")
        case "producer.before_end":
            return Step("REPORTED", number=int(line["decision"] == "C"))
        case _:
            return None


# -- queues --------------------------------------------------------------------------------------------------------

_Key = tuple[int, int]
"""(group id, queue id)"""


@dataclass(frozen=True, slots=True)
class _Event:
    """What was committed about a queue of a group. `kind`: a word of the model, or another one, which it refuses.

    `owner` is None if it is not known. `place`: the offset that was stored, or that of the message.
    """

    kind: str
    owner: str | None
    epoch: int = 0
    place: int = 0


def of_lease(history: History) -> list[Trace]:
    """Three messages of each queue and group, again and again.

    Messages that the group has sent back or given up are left out, so others may lie between the three. An offset is
    the number of those of the three that it has passed.
    """
    entries = _entries(history)
    events = _events(history, entries)
    found = []
    for key, messages in entries.items():
        offsets = sorted(messages)
        for first in range(0, len(offsets) - MESSAGES + 1, MESSAGES):
            chosen = offsets[first : first + MESSAGES]
            steps = _steps(chosen, events[key])
            owners = list(dict.fromkeys(one.owner for one in steps if one.owner is not None))
            # A crash that loses offsets puts the position back; the model has no crash of the server.
            if steps and len(owners) <= OWNERS and all(one.kind != "PLACED" for one in steps):
                numbers = {owner: number for number, owner in enumerate(owners)} | {None: _ANYBODY}
                about = f"{history.groups[key[0]]}, queue {key[1]}, offsets {', '.join(map(str, chosen))}"
                found.append(Trace(about, [Step(one.kind, numbers[one.owner], one.place) for one in steps]))
    return found


def _entries(history: History) -> dict[_Key, dict[int, tuple[str, str]]]:
    """The id and the name of each message by its offset, for each queue and group."""
    messages = {row["log_id"]: (str(row["message_id"]), name) for row, name in _bodies(history)}
    elsewhere = set()
    for change in history.changes:
        row = change.row
        if change.is_delete:
            continue
        if change.table == "scheduled" and row["queue_id"] is not None:
            elsewhere.add((history.queues[_number(row, "queue_id")].retry_of, row["log_id"]))
        elif change.table == "dead_letter":
            elsewhere.add((_number(row, "group_id"), row["log_id"]))
    entries: dict[_Key, dict[int, tuple[str, str]]] = defaultdict(dict)
    for change in history.changes:
        if change.table == "consume_queue" and not change.is_delete:
            row = change.row
            queue_id = _number(row, "queue_id")
            for group_id, name in history.groups.items():
                is_consumed = (group_id, history.queues[queue_id].topic_id) in history.subscribed
                if name in GROUPS and is_consumed and (group_id, row["log_id"]) not in elsewhere:
                    entries[group_id, queue_id][_number(row, "queue_offset")] = messages[row["log_id"]]
    return entries


def _events(history: History, entries: Mapping[_Key, Mapping[int, tuple[str, str]]]) -> dict[_Key, list[_Event]]:
    """What was committed about each queue and group, in order."""
    # By group, and by the id or the name of a message.
    places = {
        (history.groups[key[0]], name): (key, offset)
        for key, messages in entries.items()
        for offset, names in messages.items()
        for name in names
    }
    handlers = _handlers(history)
    owners: dict[tuple[_Key, int], str] = {}
    events: dict[_Key, list[_Event]] = defaultdict(list)
    for _, transaction in itertools.groupby(history.changes, key=lambda change: change.commit):
        changes = [change for change in transaction if not change.is_delete]
        begins_life = any(change.table == "life" for change in changes)
        tables: dict[tuple[_Key, int], list[str]] = defaultdict(list)
        for change in changes:
            row = change.row
            if change.table in ("outbox_inbox", "shop_effect"):
                group = str(row.get("consumer_group") or row["group"])
                name = str(row.get("message_id") or row["name"])
                if (group, name) in places:
                    tables[places[group, name]].append(change.table)
            elif change.table in ("queue_lease", "consumer_offset"):
                key = (_number(row, "group_id"), _number(row, "queue_id"))
                epoch = _number(row, "epoch")
                if change.table == "queue_lease" and (key, epoch) not in owners and (begins_life or row["owner"]):
                    owners[key, epoch] = "" if begins_life else str(row["owner"])
                    if not begins_life:
                        events[key].append(_Event("ACQUIRED", row["owner"], epoch))
                elif change.table == "consumer_offset" and epoch:
                    owner = owners.get((key, epoch), f"epoch {epoch}")
                    events[key].append(
                        _Event("STORED" if owner else "PLACED", owner, epoch, _number(row, "next_offset"))
                    )
        for (key, place), found in tables.items():
            message_id = entries[key][place][0]
            acquired = {one.owner for one in events[key] if one.kind == "ACQUIRED"}
            known = acquired & handlers.get((history.groups[key[0]], message_id), set())
            # The inbox row without the effect, the effect alone, or two effects are no step of the model.
            word = "EFFECT" if sorted(found) == ["outbox_inbox", "shop_effect"] else "_AND_".join(found)
            events[key].append(_Event(word, known.pop() if len(known) == 1 else None, place=place))
    return events


def _handlers(history: History) -> dict[tuple[str, str], set[str]]:
    """The instances of the process whose transaction has handled a message, by group and message, if that is certain.

    It is certain if only one process was ready to commit it, or if only one has written down that it has.
    """
    instances: dict[str, set[str]] = defaultdict(set)
    for change in history.changes:
        if change.table == "consumer" and not change.is_delete:
            instances[str(change.row["pid"])].add(str(change.row["instance_id"]))
    wrote: dict[str, dict[tuple[str, str], set[str]]] = defaultdict(lambda: defaultdict(set))
    for line in history.lines:
        if line["event"] == "step" and str(line["point"]).startswith("consumer."):
            for message_id in line["messages"]:
                wrote[line["point"]][line["group"], message_id].add(str(line["pid"]))
    found = {}
    for which, before in wrote["consumer.before_inbox_commit"].items():
        after = wrote["consumer.after_inbox_commit"].get(which, set())
        for pids in (before, after):
            if len(pids) == 1:
                found[which] = instances[next(iter(pids))]
    return found


def _steps(chosen: Sequence[int], events: Iterable[_Event]) -> list[_Event]:
    """What happened to the chosen messages, from the acquisition on by the first owner that did something to them.

    The places of the result are numbers of the chosen messages.
    """
    steps: list[_Event] = []
    # How many of the messages the offsets of each epoch have passed, and those of the newest one.
    passed: dict[int, int] = {}
    newest = (0, 0)
    for event in events:
        if event.kind == "ACQUIRED":
            passed[event.epoch] = newest[1]
            steps.append(event)
        elif event.kind == "STORED":
            count = sum(offset < event.place for offset in chosen)
            if count != passed.get(event.epoch, 0):
                steps.append(replace(event, place=count))
            passed[event.epoch] = count
            newest = (event.epoch, count) if event.epoch >= newest[0] else newest
        elif event.kind == "PLACED":
            steps.append(replace(event, place=0))
        elif event.place in chosen:
            steps.append(replace(event, place=chosen.index(event.place)))
    marks = [place for place, step in enumerate(steps) if step.kind not in ("ACQUIRED", "PLACED")]
    if not marks:
        return []
    begin = marks[0]
    for mark in marks:
        owner = steps[mark].owner
        acquired = [
            place
            for place, step in enumerate(steps[:mark])
            if step.kind == "ACQUIRED" and (owner is None or step.owner == owner)
        ]
        begin = min([begin, *acquired[-1:]])
    return steps[begin : marks[-1] + 1]


def _number(row: Row, column: str) -> int:
    return int(str(row[column]))


# -- ticks ---------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Tick:
    """What one transaction has put into queues; `snapshot` is that of its tick, '' without one."""

    snapshot: str
    appended: set[str]


def of_tick(history: History) -> list[Trace]:
    """Three transactions that decided COMMIT, again and again in the order of their ids, and the ticks that read them.

    Ticks are left out if they neither append a message of the three nor are the first to see one. So are transactions
    with a message that is delayed or held, because its decision does not put it into a queue.
    """
    log_ids: dict[int, set[str]] = defaultdict(set)
    later = {row["log_id"] for row in _inserted(history, "scheduled", "held")}
    changes: list[int | _Tick] = []
    for _, transaction in itertools.groupby(history.changes, key=lambda change: change.commit):
        tick = _Tick("", set())
        for change in transaction:
            row = change.row
            if change.is_delete:
                continue
            if change.table == "op_log" and row["decision"] == "C":
                xid = _number(row, "xid")
                if xid not in log_ids:
                    changes.append(xid)
                log_ids[xid] |= set(str(row["log_ids"]).strip("{}").split(","))
            elif change.table == "tick":
                tick.snapshot = str(row["snapshot"])
            elif change.table == "consume_queue" and row["attempt"] == "0":
                tick.appended.add(str(row["log_id"]))
        if tick.snapshot or tick.appended:
            changes.append(tick)
    xids = [xid for xid in sorted(log_ids) if not log_ids[xid] & later]
    found = []
    for first in range(0, len(xids) - MESSAGES + 1, MESSAGES):
        chosen = xids[first : first + MESSAGES]
        steps = _tick_steps({xid: log_ids[xid] for xid in chosen}, changes)
        # After a restart of the server, a comparison of all decisions appends what the lost ticks had appended.
        if steps is not None:
            found.append(Trace(f"transactions {', '.join(map(str, chosen))}", steps))
    return found


def _tick_steps(chosen: Mapping[int, set[str]], changes: Iterable[int | _Tick]) -> list[Step] | None:
    """The steps that concern the chosen transactions; None if no tick has appended their messages."""
    steps: list[Step] = []
    seen = 0
    for change in changes:
        if isinstance(change, int):
            if change in chosen:
                steps.append(Step("COMMITTED", number=list(chosen).index(change) + 1))
            continue
        appended = sum(2**place for place, log_ids in enumerate(chosen.values()) if log_ids & change.appended)
        if appended and not change.snapshot:
            return None
        if change.snapshot:
            sees = sum(2**place for place, xid in enumerate(chosen) if _is_visible(xid, change.snapshot))
            if appended or sees != seen:
                steps.append(Step("TICK", appended, sees))
            seen = sees
    return steps


def _is_visible(xid: int, snapshot: str) -> bool:
    """Whether a committed transaction is visible in a snapshot, as PostgreSQL writes it."""
    _, xmax, running = snapshot.split(":")
    return xid < int(xmax) and str(xid) not in running.split(",")


def _inserted(history: History, *tables: str) -> Iterator[Row]:
    return (change.row for change in history.changes if change.table in tables and not change.is_delete)


# -- claims --------------------------------------------------------------------------------------------------------


def of_claim(history: History) -> list[Trace]:
    """The messages that the group `charge` has claimed: one trace for each. A claim is an actor of its own."""
    names = {row["message_id"]: name for row, name in _bodies(history)}
    claimed = {str(row["message_id"]) for row in _inserted(history, "outbox_claim")}
    by_name = {names[message_id]: message_id for message_id in claimed}
    tokens = _tokens(history)
    steps: dict[str, list[Step]] = defaultdict(list)
    # The number of the newest claim with a token, and the present token of a message.
    claims: dict[tuple[str, str], int] = {}
    present: dict[str, str | None] = {}

    def actor(message_id: str, *points: str) -> int:
        """The claim that has made a step: the only one that was ready to, or the only one that says it has."""
        for point in points:
            if len(found := tokens[point, message_id]) == 1:
                return claims.get((message_id, next(iter(found))), _ANYBODY)
        return _ANYBODY

    for _, transaction in itertools.groupby(history.changes, key=lambda change: change.commit):
        finished: dict[str, list[str]] = defaultdict(list)
        for change in transaction:
            row = change.row
            message_id = str(row.get("message_id"))
            if change.is_delete and change.table != "outbox_claim":
                continue
            if change.table == "shop_effect" and row["group"] == "charge":
                finished[by_name.get(str(row["name"]), "")].append(change.table)
            elif message_id not in claimed or row.get("consumer_group") != "charge":
                continue
            elif change.table == "outbox_inbox" or (change.table == "outbox_claim" and change.is_delete):
                finished[message_id].append(change.table)
                present[message_id] = None
            elif change.table == "outbox_claim" and row["token"] != present.get(message_id):
                present[message_id] = row["token"]
                number = sum(step.word == "CLAIMED" for step in steps[message_id])
                claims[message_id, str(row["token"])] = number
                steps[message_id].append(Step("CLAIMED", number))
            elif change.table == "outbox_step" and row["result"] is not None:
                steps[message_id].append(Step("STORED", actor(message_id, "claim.in_step", "claim.after_step")))
        for message_id, tables in finished.items():
            who = actor(message_id, "claim.before_commit", "claim.after_commit")
            if sorted(tables) == ["outbox_claim", "outbox_inbox", "shop_effect"]:
                steps[message_id].append(Step("FINISHED", who))
            elif tables != ["outbox_claim"]:
                # One of them alone is no step of the model, except a claim that is given up.
                steps[message_id].append(Step("_AND_".join(tables), who))
    most = {message_id: sum(step.word == "CLAIMED" for step in found) for message_id, found in steps.items()}
    return [Trace(message_id, found) for message_id, found in steps.items() if most[message_id] <= CLAIMS]


def _tokens(history: History) -> dict[tuple[str, str], set[str]]:
    """The tokens of the claims that have passed a point, by point and message."""
    found: dict[tuple[str, str], set[str]] = defaultdict(set)
    for line in history.lines:
        if line["event"] == "step" and str(line["point"]).startswith("claim."):
            found[line["point"], line["message"]].add(str(line["token"]))
    return found


# -- the command ---------------------------------------------------------------------------------------------------

OF_MODEL: Final[Mapping[str, Callable[[History], list[Trace]]]] = {
    "ledger": of_ledger,
    "lease": of_lease,
    "tick": of_tick,
    "claim": of_claim,
}


def recorded(plan: Plan, folder: Path, server: RecordedServer) -> dict[str, list[Trace]]:
    """The traces of a storm, by model."""
    history = record(plan, folder, server)
    return {model: take(history) for model, take in OF_MODEL.items()}


def keep(path: Path, traces: Iterable[Trace]) -> None:
    """Write traces to a file, each different one once, and one a line."""
    different = {str(trace): trace.about for trace in traces}
    path.write_text("".join(f"{about}: {text}\n" for text, about in different.items()), encoding="utf-8")


def kept(path: Path) -> list[Trace]:
    """The traces of a file that `keep` has written."""
    return [Trace.read(*line.split(": ", 1)) for line in path.read_text(encoding="utf-8").splitlines()]


def main() -> int:
    """Record storms, and print how many of their traces the models refuse."""
    parser = argparse.ArgumentParser(prog="python -m tests.proof.traces", description=__doc__)
    parser.add_argument("--seconds", type=float, default=30, help="how long clients and faults last in a storm")
    parser.add_argument("--seed", type=int, default=int(time.time()) % 1_000_000, help="the seed of the first storm")
    parser.add_argument("--storms", type=int, default=2)
    parser.add_argument("--keep", type=Path, help="write the different traces of each model into this folder")
    options = parser.parse_args()
    taken: dict[str, list[Trace]] = defaultdict(list)
    with tempfile.TemporaryDirectory(prefix="traces-", ignore_cleanup_errors=True) as made:
        server = RecordedServer(Path(made) / "server")
        try:
            for seed in range(options.seed, options.seed + options.storms):
                plan = Plan(seed, ("atomic", "two-phase")[seed % 2], celery=False, seconds=options.seconds)
                print(f"storm {seed} ({plan.path})", flush=True)
                for model, traces in recorded(plan, Path(made) / f"storm{seed}", server).items():
                    taken[model] += traces
        finally:
            server.stop()
    wrong = 0
    for model, traces in taken.items():
        if options.keep:
            keep(options.keep / f"{model}.txt", traces)
        found = replay(model, traces)
        wrong += len(found.refused)
        print(f"{model}: {len(traces)} traces, {found.different} different, {len(found.refused)} refused")
        for sentence in found.refused:
            print(f"  {sentence}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
