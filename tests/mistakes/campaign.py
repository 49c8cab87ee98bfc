"""Many programs at once: run them all, let everything settle once, judge each; print what failed."""

from __future__ import annotations

import contextlib
import itertools
import uuid
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pprint import pformat
from uuid import UUID

import psycopg
from django.db import connections

from outbox import Delivery, Subscription
from outbox.broker.consumer.runtime import ConsumerRuntime
from outbox.broker.database.connection import BrokerDatabase
from outbox.broker.leading import Sequencer
from outbox.contrib.django import run_check_back
from outbox.contrib.django.database.aliases import alias_conninfo
from outbox.contrib.django.engine.broker import flush, get_codecs
from outbox.contrib.django.settings.conf import get_settings
from outbox.ports import ConsumeCounts
from tests.django.shop.models import Effect, Order
from tests.mistakes.generator import Side, generate
from tests.mistakes.grammar import Program, steps_of
from tests.mistakes.interpreter import run
from tests.mistakes.oracle import Finding, Kind, State, judge
from tests.mistakes.others import DUPLICATE, LOCKED, Others
from tests.mistakes.traces import Sent, Trace
from tests.mistakes.values import KEY_END
from tests.support import eventually

_names = itertools.count(1)


@dataclass(frozen=True)
class Verdict:
    """One program, how it ended, and the rules it broke."""

    program: Program
    ended_with: str
    findings: Sequence[Finding]

    @property
    def kinds(self) -> set[Kind]:
        """The rules it broke."""
        return {finding.kind for finding in self.findings}


class Campaign:
    """Runs programs on one alias, with the broker that the settings name."""

    def __init__(self, alias: str) -> None:
        self.alias = alias
        self._delivered: Counter[str] = Counter()
        self._received: dict[str, Sent] = {}
        self._ids: set[UUID] = set()
        self._stack = contextlib.ExitStack()
        self._broker = self._stack.enter_context(
            psycopg.connect(alias_conninfo(get_settings().broker), autocommit=True)
        )
        database = BrokerDatabase(alias_conninfo(get_settings().broker), get_settings().schema)
        self._sequencing = self._stack.enter_context(contextlib.closing(database.connect(name="mistakes")))
        self._sequencer = Sequencer(database, uuid.uuid4())
        # Deliveries are seen from outside of Django, so that no inbox hides a second one.
        group = f"collector-{uuid.uuid4().hex[:8]}"
        collectors = [Subscription(group=group, topic=topic, batch=200) for topic in ("orders", "reminders")]
        self._runtime = ConsumerRuntime(database, [(one, self._collect) for one in collectors], codecs=get_codecs())

    def close(self) -> None:
        """Give back the connections."""
        self._stack.close()

    def judged(self, programs: Sequence[Program]) -> list[Verdict]:
        """Run programs one after the other and judge them together."""
        before = self._last_log_id()
        with contextlib.closing(Others(self.alias)) as others:
            traces = [run(program, f"m{next(_names)}", others) for program in programs]
            self._settle(before)
            state = self._state(traces, before)
        return [Verdict(trace.program, trace.ended_with, judge(trace, state)) for trace in traces]

    # -- letting everything settle ------------------------------------------------------------------

    def _last_log_id(self) -> int:
        row = self._broker.execute("SELECT coalesce(max(log_id), 0) FROM outbox.commit_log").fetchone()
        assert row is not None
        return int(row[0])

    def _settle(self, after: int) -> None:
        connections[self.alias].close()
        assert flush(within_seconds=30)
        eventually(lambda: self._all_decided(after), what="every half message is decided")
        while self._sequence() or self._runtime.run_once() != ConsumeCounts():
            pass

    def _all_decided(self, after: int) -> bool:
        run_check_back()
        undecided = self._broker.execute(
            "SELECT 1 FROM outbox.commit_log WHERE log_id > %s AND half AND NOT EXISTS"
            " (SELECT 1 FROM outbox.op_log WHERE op_log.transaction_id = commit_log.transaction_id)",
            [after],
        )
        return undecided.fetchone() is None

    def _sequence(self) -> bool:
        counts = self._sequencer.run_once(self._sequencing)
        return counts.ticked or counts.more

    def _collect(self, deliveries: Sequence[Delivery]) -> None:
        for delivery in deliveries:
            name, mark, _ = delivery.key.partition(KEY_END)
            self._delivered[name] += 1
            if mark:
                message = delivery.message
                self._received[name] = Sent(delivery.key, message.tag, message.headers, delivery.body)
        self._ids.update(delivery.message_id for delivery in deliveries)

    # -- what is there afterwards -------------------------------------------------------------------

    def _state(self, traces: Iterable[Trace], before: int) -> State:
        """Reads what the programs left, and takes it away, so that a long run does not slow down."""
        rows = set(Order.objects.using(self.alias).values_list("number", flat=True)) - {DUPLICATE, LOCKED}
        effects = Counter(Effect.objects.using(self.alias).values_list("number", flat=True))
        with connections[self.alias].cursor() as cursor:
            cursor.execute("DELETE FROM shop_order WHERE number NOT IN (%s, %s)", [DUPLICATE, LOCKED])
            cursor.execute("DELETE FROM shop_effect")
            for table in ("outbox_unique", "outbox_claim", "outbox_step"):
                cursor.execute(f"DELETE FROM {table}")
        guessed = self._broker.execute(
            "SELECT split_part(l.key, %s, 1) FROM outbox.commit_log l JOIN outbox.op_log o USING (transaction_id)"
            " WHERE l.log_id > %s AND o.decision = 'R' AND o.decided_by = 'P'",
            [KEY_END, before],
        )
        received, self._received = self._received, {}
        delivered, self._delivered = self._delivered, Counter()
        ids, self._ids = self._ids, set()
        return State(rows, delivered, ids, {key for (key,) in guessed}, effects, received)


# -- random programs, and what to say about them ----------------------------------------------------


@dataclass(frozen=True)
class Conviction:
    """A program of a seed that broke rules."""

    seed: int
    verdict: Verdict


def convictions(campaign: Campaign, side: Side, seeds: range, *, batch: int = 100) -> Iterator[Conviction]:
    """The seeds whose programs break a rule."""
    vendor = connections[campaign.alias].vendor
    for start in range(0, len(seeds), batch):
        part = seeds[start : start + batch]
        verdicts = campaign.judged([generate(seed, side, vendor) for seed in part])
        yield from (Conviction(seed, one) for seed, one in zip(part, verdicts, strict=True) if one.findings)


def report(found: Sequence[Conviction]) -> str:
    """How often each rule was broken, by which seeds, and the shortest program for each."""
    by_kind: dict[Kind, list[Conviction]] = defaultdict(list)
    for item in found:
        for kind in item.verdict.kinds:
            by_kind[kind].append(item)
    lines = [f"{len(found)} programs broke the promise"]
    for kind, items in sorted(by_kind.items(), key=lambda entry: -len(entry[1])):
        seeds = ", ".join(str(item.seed) for item in items[:10])
        lines += ["", f"{kind.name}, {kind}: {len(items)} times, seeds {seeds}"]
        shortest = min(items, key=lambda item: len(list(steps_of(item.verdict.program))))
        lines += [f"  seed {shortest.seed}; it ended with {shortest.verdict.ended_with or 'no error'!r}:"]
        lines += [f"    {line}" for line in pformat(shortest.verdict.program).splitlines()]
        lines += [f"  {finding}" for finding in shortest.verdict.findings]
    return "\n".join(lines)
