"""Which group of brokers a consumer thread asks next, in a simulation of many threads."""

from __future__ import annotations

import heapq
from collections import Counter

import pytest

from outbox.rocketmq.client import BrokerChoice

WAIT_SECONDS = 5.0


def receives(threads: int, full: set[str], seconds: float, groups: tuple[str, ...] = ("a", "b", "c")) -> Counter[str]:
    """How often the threads ask each group. A group in `full` answers after 10 ms, the others after five seconds."""
    choice, found = BrokerChoice(), Counter[str]()
    last: dict[int, str] = {}
    due = [(0.001 * thread, thread) for thread in range(threads)]
    while due[0][0] < seconds:
        now, thread = heapq.heappop(due)
        before = last.get(thread)
        if before is not None:
            choice.answered(before, has_messages=before in full, now=now)
        last[thread] = chosen = choice.choose(groups, before, now=now)
        found[chosen] += 1
        heapq.heappush(due, (now + (0.01 if chosen in full else WAIT_SECONDS), thread))
    return found


@pytest.mark.parametrize("threads", [3, 8, 40])
def test_all_threads_but_one_of_each_empty_group_serve_the_group_with_messages(threads: int) -> None:
    found = receives(threads, {"a"}, 60)
    # At first the threads spread over the groups, and leave the empty groups after one wait.
    assert found["a"] >= (threads - 2) * 100 * (60 - 2 * WAIT_SECONDS)
    assert found["b"] >= 10 and found["c"] >= 10


def test_few_threads_ask_every_group() -> None:
    found = receives(1, {"a"}, 120)
    assert found["a"] >= 100
    assert found["b"] >= 7 and found["c"] >= 7


def test_no_group_is_left_out_while_others_have_messages() -> None:
    found = receives(2, {"a", "b", "c"}, 60)
    assert sorted(found) == ["a", "b", "c"]
    assert min(found.values()) >= 60 / WAIT_SECONDS / 2


def test_groups_that_come_and_go() -> None:
    """The master of a group dies, and another one is promoted."""
    choice = BrokerChoice()
    assert choice.choose(["a", "b"], None, now=0.0) == "a"
    choice.answered("a", has_messages=True, now=0.1)
    assert choice.choose(["b"], "a", now=0.1) == "b"
    choice.answered("b", has_messages=True, now=0.2)
    assert choice.choose(["a", "b"], "b", now=0.2) == "b"
