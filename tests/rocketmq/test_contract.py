"""The contract suite on RocketMQ: every case but those that need something it lacks (docs/engines.md)."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import ModuleType

import pytest

from outbox.rocketmq import admin, consumer, producer, wire
from outbox.topic import MessageType, Topic
from outbox.transaction import Decision
from tests.contract import (
    test_consumers,
    test_consumption,
    test_fencing,
    test_recall,
    test_switches,
    test_time,
    test_transactional,
)
from tests.contract.benches import Bench
from tests.rocketmq.bench import RocketMQBench
from tests.rocketmq.conftest import unique
from tests.rocketmq_server import PrivateRocketMQ

ROOT = Path(__file__).resolve().parent.parent.parent
SUITE = (
    test_consumers,
    test_consumption,
    test_fencing,
    test_recall,
    test_switches,
    test_time,
    test_transactional,
)
# Each waits for a server's seconds; these few run always.
ALWAYS = {
    "test_rollback_is_never_seen_and_commit_is_seen_once",
}
# Case -> why it is left out, in words of docs/engines.md or its list of what works.
HALF = "RocketMQ's half messages have neither an order nor a delivery time"
LACKING: Mapping[str, str] = {
    **dict.fromkeys(
        [
            "test_fifo_and_transactional_hold_together",
            "test_fifo_continues_when_the_earlier_one_rolls_back",
            "test_messages_of_one_key_keep_their_order",
        ],
        HALF,
    ),
    **dict.fromkeys(
        [
            "test_same_decision_twice_gives_one_message",
            "test_contradicting_decision_is_reported_and_the_first_is_final",
            "test_end_of_unknown_transaction_or_other_group_is_refused",
            "test_lost_end_message_is_settled_by_check_back",
        ],
        "The first decision is final only in the ledger",
    ),
    **dict.fromkeys(
        [
            "test_answer_that_does_not_count_uses_up_no_check",
            "test_no_producer_of_the_group_alive_uses_up_no_check_and_a_restart_decides",
            "test_per_message_immunity_is_honoured_without_using_up_checks",
        ],
        "It stops after `transactionCheckMax`",
    ),
    **dict.fromkeys(
        [
            "test_resent_half_is_stored_once",
            "test_resent_plain_message_is_stored_once",
            "test_a_message_is_stored_once_whatever_is_sent_with_it",
        ],
        "If a producer sends a message again, RocketMQ stores a second message",
    ),
    **dict.fromkeys(
        [
            "test_after_the_last_attempt_it_is_a_dead_letter",
            "test_hopeless_message_is_a_dead_letter_at_once",
            "test_undecodable_body_is_a_dead_letter_and_blocks_no_other_message",
            "test_one_poison_message_takes_none_of_its_batch_along",
            "test_failed_message_is_tried_again",
            "test_batch_handler_gets_lists_and_may_fail_in_part",
        ],
        "reset, audit, reconciliation | yes | -",
    ),
    # It also holds that nothing is asked about whose end is late by a second; the case below is the rest of it.
    "test_message_visibility": "It stops after `transactionCheckMax`",
    **dict.fromkeys(
        [
            "test_a_bounded_pass_handles_what_is_there_and_counts_it",
            "test_a_pass_goes_on_where_the_group_is",
            "test_consumers_handle_their_own_subscriptions_only",
        ],
        "report of what is due now",
    ),
    "test_delayed_message_waits_for_its_time": HALF,
    "test_a_delay_counts_from_when_the_broker_stores_the_message": HALF,
    "test_a_group_starts_by_the_time_of_queueing": "new group that starts at the latest message",
}
LACKING_MODULES: Mapping[ModuleType, str] = {
    test_fencing: "producers with a transactional id",
    test_recall: "recall of messages that it has stored",
    test_switches: "rejectTransactionMessage",
}
TOPICS = [
    Topic(name="orders", queue_count=4),
    Topic(name="steps", types=frozenset({MessageType.FIFO}), queue_count=4),
    Topic(name="later", types=frozenset({MessageType.NORMAL, MessageType.DELAY}), queue_count=2),
    Topic(name="bound", types=frozenset({MessageType.TRANSACTION}), queue_count=2),
    Topic(name="plain", types=frozenset({MessageType.NORMAL}), queue_count=2),
]


@pytest.fixture
def bench(rocketmq: PrivateRocketMQ, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    """RocketMQ; the server has every name of the suite under a prefix of this test's."""
    prefix = unique("c") + "-"
    for module in (admin, consumer, producer, wire):
        monkeypatch.setattr(module, "wire_name", lambda name: prefix + name)
    bench = RocketMQBench(rocketmq, TOPICS)
    yield bench
    bench.close()


@pytest.fixture
def any_path(bench: Bench) -> Bench:
    """There is one path."""
    return bench


def cases() -> Iterator[tuple[str, Callable[..., None]]]:
    """The tests of the suite that run here, by name."""
    for module in SUITE:
        if module not in LACKING_MODULES:
            for name, case in inspect.getmembers(module, inspect.isfunction):
                if name.startswith("test_") and name not in LACKING:
                    yield name, case


def here(name: str, case: Callable[..., None]) -> Callable[..., None]:
    """A case of this module's own: a mark on the suite's would be one on every engine."""

    @functools.wraps(case)
    def run(*args: object, **fixtures: object) -> None:
        case(*args, **fixtures)

    return run if name in ALWAYS else pytest.mark.soak(run)


for _name, _case in cases():
    globals()[_name] = here(_name, _case)


def test_what_is_left_out_is_in_the_suite() -> None:
    """A case that was renamed must not be left out unseen."""
    known = {name for module in SUITE for name in vars(module)}
    assert set(LACKING) <= known


def test_the_page_has_every_reason() -> None:
    names = ("engines.md", "maintainers/rocketmq-operations.md")
    pages = [(ROOT / "docs" / name).read_text(encoding="utf-8") for name in names]
    page = " ".join(" ".join(pages).split())
    assert [reason for reason in {*LACKING.values(), *LACKING_MODULES.values()} if reason not in page] == []


def test_visibility_matrix(bench: Bench) -> None:
    """120 messages for each way a transaction can go; exactly the committed ones are consumed."""
    outcomes = ("commit", "rollback", "commit in check", "rollback in check", "unknown")
    sent = {
        outcome: [test_transactional.half(test_transactional.message(n)) for n in range(120)] for outcome in outcomes
    }
    decisions = {
        one.transaction_id: Decision.COMMIT if outcome.startswith("commit") else Decision.ROLLBACK
        for outcome in outcomes[:4]
        for one in sent[outcome]
    }
    for halves in zip(*sent.values(), strict=True):
        for one in halves:
            bench.broker.send_half(one)
    for outcome in outcomes[:2]:
        bench.broker.end([test_transactional.end(one, decisions[one.transaction_id]) for one in sent[outcome]])
    checker = test_transactional.AnswerWith(lambda check: decisions.get(check.transaction_id, Decision.UNKNOWN))
    test_transactional.check_back(bench, checker)
    visible = bench.visible("orders")
    committed = [one.messages[0] for outcome in ("commit", "commit in check") for one in sent[outcome]]
    assert test_transactional.ids(visible) == test_transactional.ids(committed)
    undecided = {one.transaction_id for outcome in outcomes[2:] for one in sent[outcome]}
    assert undecided <= {check.transaction_id for check in checker.asked}
