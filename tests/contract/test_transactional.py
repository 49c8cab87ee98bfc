"""Transactional messages: the conformance scenarios every broker must pass (RocketMQ's, restated)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import pytest

from outbox.checkback import CheckBack
from outbox.errors import InvalidMessage, MessageTypeMismatch, UnknownTopic
from outbox.message import Message
from outbox.transaction import Answer, Check, Decision, EndStatus, EndTransaction, HalfTransaction
from tests.contract.benches import GROUP, Bench


def message(number: int = 0, *, topic: str = "orders", key: str = "") -> Message:
    return Message(topic=topic, body=f'{{"n":{number}}}'.encode(), key=key)


def half(*messages: Message, group: str = GROUP) -> HalfTransaction:
    return HalfTransaction(producer_group=group, messages=messages)


def end(of: HalfTransaction, decision: Decision, *, group: str = GROUP) -> EndTransaction:
    return EndTransaction(transaction_id=of.transaction_id, decision=decision, producer_group=group)


class AnswerWith:
    """A checker that gives each check the decision of a function."""

    def __init__(self, decide: Callable[[Check], Decision], *, counts: bool = True) -> None:
        self.decide, self.counts = decide, counts
        self.asked: list[Check] = []

    def check_local_transactions(self, checks: Sequence[Check]) -> Iterator[Answer]:
        for check in checks:
            self.asked.append(check)
            yield Answer(transaction_id=check.transaction_id, decision=self.decide(check), counts=self.counts)


def check_back(bench: Bench, checker: AnswerWith, group: str = GROUP) -> None:
    # One batch: with nothing to wait between checks, an UNKNOWN would be asked again at once.
    CheckBack(bench.broker, group, checker).run_once(max_batches=1)


def ids(messages: Sequence[Message]) -> set[object]:
    return {m.message_id for m in messages}


def test_message_visibility(bench: Bench) -> None:
    """120 messages for each way a transaction can go; exactly the committed ones are consumed."""
    outcomes = ("commit", "rollback", "commit in check", "rollback in check", "unknown")
    sent = {outcome: [half(message(n)) for n in range(120)] for outcome in outcomes}
    for halves in zip(*sent.values(), strict=True):
        for one in halves:
            bench.broker.send_half(one)
    bench.broker.end([end(one, Decision.COMMIT) for one in sent["commit"]])
    bench.broker.end([end(one, Decision.ROLLBACK) for one in sent["rollback"]])
    answers = {one.transaction_id: Decision.COMMIT for one in sent["commit in check"]}
    answers |= {one.transaction_id: Decision.ROLLBACK for one in sent["rollback in check"]}
    checker = AnswerWith(lambda check: answers.get(check.transaction_id, Decision.UNKNOWN))
    check_back(bench, checker)

    committed = [one.messages[0] for one in [*sent["commit"], *sent["commit in check"]]]
    visible = bench.visible("orders")
    assert ids(visible) == ids(committed)
    assert len(visible) == 240
    assert {c.transaction_id for c in checker.asked} == {h.transaction_id for o in outcomes[2:] for h in sent[o]}


def test_half_message_is_invisible_before_its_decision(bench: Bench) -> None:
    undecided = half(message(1))
    bench.broker.send_half(undecided)
    for _ in range(3):
        assert bench.visible("orders") == [], "a half alone"
    bench.broker.send([message(2)])
    assert [m.body for m in bench.visible("orders")] == [b'{"n":2}']
    bench.broker.end([end(undecided, Decision.COMMIT)])
    for _ in range(3):
        assert sorted(m.body for m in bench.visible("orders")) == [b'{"n":1}', b'{"n":2}']


def test_all_or_none_of_one_publish(any_path: Bench) -> None:
    kept, dropped = [message(n) for n in range(50)], [message(n) for n in range(50, 100)]
    any_path.publish(dropped, commit=False)
    any_path.publish(kept, commit=True)
    assert ids(any_path.visible("orders")) == ids(kept)


def test_rollback_is_never_seen_and_commit_is_seen_once(any_path: Bench) -> None:
    kept = []
    for number in range(60):
        one = message(number)
        any_path.publish([one], commit=number % 3 != 0)
        if number % 3:
            kept.append(one)
    visible = any_path.visible("orders")
    assert ids(visible) == ids(kept)
    assert len(visible) == len(kept)


def test_same_decision_twice_gives_one_message(bench: Bench) -> None:
    one = half(message())
    bench.broker.send_half(one)
    assert bench.broker.end([end(one, Decision.COMMIT)]) == [EndStatus.APPLIED]
    assert bench.broker.end([end(one, Decision.COMMIT), end(one, Decision.COMMIT)]) == [EndStatus.REPEATED] * 2
    assert len(bench.visible("orders")) == 1
    assert bench.incidents() == []


@pytest.mark.parametrize("first", [Decision.COMMIT, Decision.ROLLBACK])
def test_contradicting_decision_is_reported_and_the_first_is_final(bench: Bench, first: Decision) -> None:
    other = Decision.ROLLBACK if first is Decision.COMMIT else Decision.COMMIT
    one = half(message())
    bench.broker.send_half(one)
    bench.broker.end([end(one, first)])
    assert bench.broker.end([end(one, other)]) == [EndStatus.CONTRADICTED]
    assert len(bench.visible("orders")) == (first is Decision.COMMIT)
    assert any(str(one.transaction_id) in incident for incident in bench.incidents())


def test_end_of_unknown_transaction_or_other_group_is_refused(bench: Bench) -> None:
    one, never_sent = half(message()), half(message())
    bench.broker.send_half(one)
    refused = [end(never_sent, Decision.COMMIT), end(one, Decision.COMMIT, group="stranger")]
    assert bench.broker.end(refused) == [EndStatus.REFUSED, EndStatus.REFUSED]
    assert bench.visible("orders") == []
    assert len(bench.incidents()) == 2


def test_lost_end_message_is_settled_by_check_back(bench: Bench) -> None:
    one = half(message())
    bench.broker.send_half(one)
    check_back(bench, AnswerWith(lambda check: Decision.COMMIT))
    assert ids(bench.visible("orders")) == ids(one.messages)
    assert bench.broker.end([end(one, Decision.COMMIT)]) == [EndStatus.REPEATED]


def test_unknown_is_asked_again_until_it_is_decided(bench: Bench) -> None:
    one = half(message())
    bench.broker.send_half(one)
    checker = AnswerWith(lambda check: Decision.COMMIT if len(checker.asked) > 2 else Decision.UNKNOWN)
    for _ in range(3):
        assert bench.visible("orders") == []
        check_back(bench, checker)
    counts = [check.checks for check in checker.asked]
    # RocketMQ counts what it has asked on its own, too.
    assert len(counts) == 3 and counts == sorted(set(counts))
    assert ids(bench.visible("orders")) == ids(one.messages)


def test_answer_that_does_not_count_uses_up_no_check(bench: Bench) -> None:
    one = half(message())
    bench.broker.send_half(one)
    for _ in range(10):
        check_back(bench, AnswerWith(lambda check: Decision.UNKNOWN, counts=False))
    checker = AnswerWith(lambda check: Decision.COMMIT)
    check_back(bench, checker)
    assert [check.checks for check in checker.asked] == [0]
    assert len(bench.visible("orders")) == 1


def test_no_producer_of_the_group_alive_uses_up_no_check_and_a_restart_decides(bench: Bench) -> None:
    one = half(message(), group="away")
    bench.broker.send_half(one)
    for _ in range(5):
        check_back(bench, AnswerWith(lambda check: Decision.ROLLBACK))
    returned = AnswerWith(lambda check: Decision.COMMIT)
    check_back(bench, returned, group="away")
    assert [check.checks for check in returned.asked] == [0]
    assert len(bench.visible("orders")) == 1


def test_exception_of_the_checker_is_unknown_for_what_was_not_answered(bench: Bench) -> None:
    first, second = half(message(1)), half(message(2))
    bench.broker.send_half(first)
    bench.broker.send_half(second)

    def decide(check: Check) -> Decision:
        if check.transaction_id == second.transaction_id:
            raise RuntimeError("the look-up failed")
        return Decision.COMMIT

    check_back(bench, AnswerWith(decide))
    assert ids(bench.visible("orders")) <= ids(first.messages)
    check_back(bench, AnswerWith(lambda check: Decision.COMMIT))
    assert ids(bench.visible("orders")) == ids([*first.messages, *second.messages])


def test_per_message_immunity_is_honoured_without_using_up_checks(bench: Bench) -> None:
    patient = HalfTransaction(producer_group=GROUP, messages=[message()], immunity_seconds=3600)
    bench.broker.send_half(patient)
    checker = AnswerWith(lambda check: Decision.ROLLBACK)
    for _ in range(5):
        check_back(bench, checker)
    assert checker.asked == []
    assert bench.broker.end([end(patient, Decision.COMMIT)]) == [EndStatus.APPLIED]


def test_resent_half_is_stored_once(bench: Bench) -> None:
    one = half(message(1), message(2))
    receipts = bench.broker.send_half(one)
    assert bench.broker.send_half(one) == receipts
    bench.broker.end([end(one, Decision.COMMIT)])
    assert len(bench.visible("orders")) == 2


def test_resent_plain_message_is_stored_once(bench: Bench) -> None:
    batch = [message(1), message(2)]
    receipts = bench.broker.send(batch)
    assert bench.broker.send(batch) == receipts
    assert len(bench.visible("orders")) == 2


def test_a_message_is_stored_once_whatever_is_sent_with_it(bench: Bench) -> None:
    old, new, twice = message(1), message(2), message(3)
    bench.broker.send([old])
    with pytest.raises(InvalidMessage, match="sent before"):
        bench.broker.send([old, new])
    with pytest.raises(InvalidMessage):
        bench.broker.send_half(half(message(4), old))
    for sent in ([new, old], [twice, twice]):
        assert [one.message_id for one in bench.broker.send(sent)] == [one.message_id for one in sent]
    assert sorted(one.body for one in bench.visible("orders")) == [b'{"n":1}', b'{"n":2}', b'{"n":3}']


def test_a_refused_half_is_an_error(bench: Bench) -> None:
    with pytest.raises(UnknownTopic, match="nowhere"):
        bench.broker.send_half(half(message(topic="nowhere")))
    with pytest.raises(MessageTypeMismatch, match="TRANSACTION"):
        bench.broker.send_half(half(message(topic="plain")))


def test_fifo_and_transactional_hold_together(bench: Bench) -> None:
    """A decided message waits for an earlier undecided one of its key, and for no other key."""
    first, second, other = (half(message(n, topic="steps", key=key)) for n, key in enumerate(("a", "a", "b")))
    for one in (first, second, other):
        bench.broker.send_half(one)
    bench.broker.end([end(second, Decision.COMMIT), end(other, Decision.COMMIT)])
    assert ids(bench.visible("steps")) == ids(other.messages)
    bench.broker.end([end(first, Decision.COMMIT)])
    of_key = [m.message_id for m in bench.visible("steps") if m.key == "a"]
    assert of_key == [first.transaction_id, second.transaction_id]


def test_fifo_continues_when_the_earlier_one_rolls_back(bench: Bench) -> None:
    first, second = (half(message(n, topic="steps", key="a")) for n in range(2))
    bench.broker.send_half(first)
    bench.broker.send_half(second)
    bench.broker.end([end(second, Decision.COMMIT)])
    assert bench.visible("steps") == []
    bench.broker.end([end(first, Decision.ROLLBACK)])
    assert ids(bench.visible("steps")) == ids(second.messages)
