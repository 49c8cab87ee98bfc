"""Parked transactions, over every broker that takes half messages: named with a reason, asked again, decided once."""

from __future__ import annotations

from outbox.transaction import Decision, EndStatus
from tests.contract.benches import CHECKS, Bench
from tests.contract.test_transactional import AnswerWith, check_back, end, half, ids, message

HOUR = 3600


def unknown(*, counts: bool = True) -> AnswerWith:
    return AnswerWith(lambda check: Decision.UNKNOWN, counts=counts)


def test_an_answer_that_does_not_count_never_parks(bench: Bench) -> None:
    one = half(message())
    bench.broker.send_half(one)
    check_back(bench, unknown(counts=False))
    bench.let_time_pass(100)
    for _ in range(CHECKS.max_checks + 2):
        check_back(bench, unknown(counts=False))
    assert bench.parked() == {}


def test_past_the_age_limit_it_is_parked_and_the_reason_names_a_group_that_does_not_ask(bench: Bench) -> None:
    away, running = half(message(), group="away"), half(message())
    bench.broker.send_half(away)
    bench.broker.send_half(running)
    bench.let_time_pass(CHECKS.max_age_seconds + 1)
    check_back(bench, unknown(counts=False))
    assert bench.parked() == {away.transaction_id: "unanswered", running.transaction_id: "age"}
    returned = AnswerWith(lambda check: Decision.COMMIT)
    check_back(bench, returned, group="away")
    assert [check.checks for check in returned.asked] == [0]
    assert ids(bench.visible("orders")) == ids(away.messages)
    assert bench.broker.end([end(away, Decision.ROLLBACK, group="away")]) == [EndStatus.CONTRADICTED], (
        "the first decision is final"
    )


def test_a_parked_one_is_asked_hourly_and_when_its_group_comes_back(bench: Bench) -> None:
    one = half(message())
    bench.broker.send_half(one)
    for _ in range(CHECKS.max_checks):
        check_back(bench, unknown())
    assert bench.parked() == {one.transaction_id: "checks"}
    asked = unknown()
    check_back(bench, asked)
    assert asked.asked == []
    bench.let_time_pass(HOUR)
    check_back(bench, asked)
    assert [check.checks for check in asked.asked] == [3], "an hour later"
    for _ in range(2):
        bench.let_time_pass(200)
        check_back(bench, asked)
    assert len(asked.asked) == 1
    bench.let_time_pass(400)
    check_back(bench, AnswerWith(lambda check: Decision.COMMIT))
    assert ids(bench.visible("orders")) == ids(one.messages), "when its group came back"
