"""Random calls of the ports Broker and Consumers, beside a model of what consumers must see then.

The model knows for each message whether it is committed, in which order its key was stored, when it is due and how
often its handler fails. After each drain, the handled messages and the dead letters are those of the model.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any
from uuid import UUID

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, rule, run_state_machine_as_test

from outbox.checkback import CheckBack
from outbox.message import Delivery, Message
from outbox.recall import RecallStatus
from outbox.retry import RetryPolicy
from outbox.subscription import Mode, Subscription
from outbox.transaction import Answer, Decision, EndStatus, EndTransaction, HalfTransaction
from tests.contract.benches import GROUP, Bench, MemoryBench
from tests.contract.conftest import TOPICS

ATTEMPTS = 3
DELAY = 600.0
KEYS = ("a", "b")


@dataclass
class Known:
    """What the model knows about one message."""

    message: Message
    decision: Decision = Decision.UNKNOWN
    failures: int = 0
    is_due: bool = True
    is_recalled: bool = False


@dataclass
class Model:
    """The messages in the order in which the broker stored them, and what follows for consumers."""

    messages: dict[UUID, Known] = field(default_factory=dict)
    delivered: set[UUID] = field(default_factory=set)

    def deliverable(self) -> list[Known]:
        """The messages that consumers see now: committed, due, and behind no undecided message of their key."""
        blocked: set[str] = set()
        found = []
        for one in self.messages.values():
            key = one.message.key if one.message.topic == "steps" else ""
            if key in blocked:
                continue
            if one.decision is Decision.UNKNOWN and key:
                blocked.add(key)
            if one.decision is Decision.COMMIT and one.is_due and not one.is_recalled:
                found.append(one)
        return found

    def drained(self) -> None:
        self.delivered |= {one.message.message_id for one in self.deliverable()}

    def handled(self) -> set[UUID]:
        return {one for one in self.delivered if self.messages[one].failures < ATTEMPTS}

    def dead(self) -> set[UUID]:
        return self.delivered - self.handled()


class Calls(RuleBasedStateMachine):
    """Calls of a broker that was used before: each example looks only at messages of its own."""

    bench: Bench
    received: list[Delivery]
    failures: dict[UUID, int]

    halves = Bundle("halves")
    delayed = Bundle("delayed")

    def __init__(self) -> None:
        super().__init__()
        self.model = Model()

    def known(self, topic: str, key: str, failures: int, **more: Any) -> Known:
        message = Message(topic=topic, body=b"{}", key=key if topic == "steps" else "", **more)
        one = Known(message, failures=failures)
        self.model.messages[message.message_id] = one
        self.failures[message.message_id] = failures
        return one

    @rule(count=st.integers(1, 3), topic=st.sampled_from(["orders", "steps"]), key=st.sampled_from(KEYS),
          failures=st.sampled_from([0, 0, 0, 1, ATTEMPTS]), commit=st.booleans())  # fmt: skip
    def publish(self, count: int, topic: str, key: str, failures: int, commit: bool) -> None:
        # A message of an ordered key is tried again by the process that has it, so no pass of a bench sees its end.
        made = [self.known(topic, key, failures if topic == "orders" else 0) for _ in range(count)]
        self.bench.publish([one.message for one in made], commit=commit)
        for one in made:
            one.decision = Decision.COMMIT if commit else Decision.ROLLBACK

    @rule(target=halves, topic=st.sampled_from(["orders", "steps"]), key=st.sampled_from(KEYS))
    def send_half(self, topic: str, key: str) -> HalfTransaction:
        half = HalfTransaction(producer_group=GROUP, messages=[self.known(topic, key, 0).message])
        self.bench.broker.send_half(half)
        return half

    @rule(half=halves, decision=st.sampled_from([Decision.COMMIT, Decision.ROLLBACK]))
    def end(self, half: HalfTransaction, decision: Decision) -> None:
        """The first decision is final, and a contradicting one is told so."""
        [message] = half.messages
        one = self.model.messages[message.message_id]
        ended = EndTransaction(transaction_id=half.transaction_id, decision=decision, producer_group=GROUP)
        [status] = self.bench.broker.end([ended])
        if one.decision is Decision.UNKNOWN:
            one.decision = decision
            assert status is EndStatus.APPLIED
        else:
            assert status is (EndStatus.REPEATED if one.decision is decision else EndStatus.CONTRADICTED)

    @rule(decision=st.sampled_from([Decision.COMMIT, Decision.ROLLBACK]))
    def check_back(self, decision: Decision) -> None:
        """Check-back asks about each undecided half message, and its answer decides."""
        asked: set[UUID] = set()

        class Checker:
            def check_local_transactions(self, checks: Sequence[Any]) -> list[Answer]:
                asked.update(one.transaction_id for one in checks)
                return [Answer(transaction_id=one.transaction_id, decision=decision) for one in checks]

        CheckBack(self.bench.broker, GROUP, Checker()).run_once()
        undecided = [one for one in self.model.messages.values() if one.decision is Decision.UNKNOWN]
        assert len(asked) == len(undecided)
        for one in undecided:
            one.decision = decision

    @rule(target=delayed)
    def publish_delayed(self) -> Known:
        one = self.known("later", "", 0, delay=timedelta(seconds=DELAY))
        self.bench.publish([one.message], commit=True)
        one.decision, one.is_due = Decision.COMMIT, False
        return one

    @rule(one=delayed)
    def recall(self, one: Known) -> None:
        # Before a tick has seen the message, the broker asks the caller to try again (RecallStatus.WAITING).
        self.drain()
        [found] = self.bench.broker.recall([one.message.message_id])
        was_waiting = not one.is_due and not one.is_recalled
        assert (found.status is RecallStatus.RECALLED) == was_waiting, found
        one.is_recalled = one.is_recalled or was_waiting

    @rule()
    def let_time_pass(self) -> None:
        self.drain()
        self.bench.let_time_pass(DELAY + 1)
        for one in self.model.messages.values():
            one.is_due = True
        self.drain()

    @rule()
    def drain(self) -> None:
        self.bench.drain()
        self.model.drained()
        mine = self.model.messages
        handled = [one.message_id for one in self.received if one.message_id in mine]
        assert sorted(handled) == sorted(self.model.handled())
        dead = {message_id for message_id, _ in self.bench.dead_letters("points") if message_id in mine}
        assert dead == self.model.dead()
        by_key: dict[str, list[UUID]] = defaultdict(list)
        for message_id in handled:
            if mine[message_id].message.topic == "steps" and (key := mine[message_id].message.key):
                by_key[key].append(message_id)
        for key, found in by_key.items():
            stored = [one for one in mine if one in found]
            assert found == stored, f"key {key!r} was handled in another order than it was stored"

    def teardown(self) -> None:
        """Leave nothing undecided or waiting for the next example."""
        self.check_back(Decision.ROLLBACK)
        self.let_time_pass()
        assert self.bench.totals_differ() == []


def calls_on(bench: Bench, received: list[Delivery], *, failing: bool = True) -> type[Calls]:
    """The calls of a bench; `received` gets the deliveries that the handler has handled."""
    failures: dict[UUID, int] = {}

    def handler(delivery: Delivery) -> None:
        if failing and delivery.attempt <= failures[delivery.message_id]:
            raise ValueError("this attempt fails")
        received.append(delivery)

    at_once = RetryPolicy(delays_seconds=[0], max_attempts=ATTEMPTS)
    for topic in ("orders", "steps", "later"):
        mode = Mode.KEY_ORDERED if topic == "steps" else Mode.CONCURRENT
        bench.subscribe(Subscription(group="points", topic=topic, mode=mode, retry=at_once), handler)

    class OnBench(Calls):
        pass

    OnBench.bench, OnBench.received, OnBench.failures = bench, received, failures
    return OnBench


def run(bench: Bench, *, examples: int, steps: int) -> None:
    received: list[Delivery] = []
    run_state_machine_as_test(
        calls_on(bench, received),
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            phases=[Phase.generate],
            report_multiple_bugs=False,
            # The quick run has the same steps each time; the long one has others.
            derandomize=examples < 10,
        ),
    )
    assert received


def test_random_calls_do_what_the_model_says(bench: Bench) -> None:
    run(bench, examples=2, steps=12)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_many_random_calls_do_what_the_model_says(bench: Bench) -> None:
    run(bench, examples=40, steps=20)


class _Forgetful(list[Delivery]):
    """Keeps only the newest delivery."""

    def append(self, delivery: Delivery) -> None:
        self[:] = [delivery]


class _Reversed(list[Delivery]):
    """Has the newest delivery first."""

    def append(self, delivery: Delivery) -> None:
        self.insert(0, delivery)


def test_controls_a_loss_another_order_and_a_missing_dead_letter_are_found() -> None:
    for received, failing, topic, failures in (
        (_Forgetful(), True, "orders", 0),
        (_Reversed(), True, "steps", 0),
        ([], False, "orders", ATTEMPTS),
    ):
        calls = calls_on(MemoryBench(TOPICS), received, failing=failing)()
        calls.publish(count=3, topic=topic, key="a", failures=failures, commit=True)
        with pytest.raises(AssertionError):
            calls.drain()
    calls = calls_on(MemoryBench(TOPICS), [])()
    calls.publish(count=3, topic="steps", key="a", failures=0, commit=True)
    calls.drain()
