"""Messages that kill or hang their process are found out, in real processes under a real supervisor."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import signal
import sys
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from outbox.broker import deaths
from outbox.broker.groups import quarantine
from outbox.broker.operations import dead_letters
from outbox.broker.supervisor import ChildSpec, Supervisor
from outbox.errors import HandlersHung
from outbox.message import Message
from outbox.subscription import Subscription
from outbox.utils.backoff import Backoff
from tests.broker.bench import AT_ONCE, FIFO, ROOT, ConsumptionBench, Seen, encode
from tests.support import eventually

SOON = Backoff(first_seconds=0.05, longest_seconds=0.2)
LONG = 90.0


@pytest.fixture
def orders(bench: ConsumptionBench) -> ConsumptionBench:
    bench.declare("orders", queues=2, types=FIFO)
    return bench


def quarantined(bench: ConsumptionBench) -> list[tuple[Any, ...]]:
    return bench.rows("SELECT log_id FROM outbox.quarantined_message")


class Workers:
    """Supervised consumers; `calls` counts the handler calls by the number in the body."""

    def __init__(self, bench: ConsumptionBench, folder: Path, supervisor: Supervisor) -> None:
        self._bench = bench
        self._folder = folder
        self.supervisor = supervisor

    def calls(self) -> Counter[int]:
        lines = (self._folder / "calls").read_text().split() if (self._folder / "calls").exists() else []
        return Counter(map(int, lines))

    def deaths(self) -> int:
        (count,) = self._bench.rows("SELECT count(*) FROM outbox.incident WHERE kind = 'process_died'")[0]
        return int(count)


@contextlib.contextmanager
def working(
    bench: ConsumptionBench,
    folder: Path,
    *,
    count: int = 1,
    drain_seconds: float = 20.0,
    backoff: Backoff = SOON,
    **options: Any,
) -> Iterator[Workers]:
    """This number of consumer processes under a supervisor, and the loop of a broker process."""
    record = functools.partial(deaths.record, bench.database)
    specs = []
    for number in range(1, count + 1):
        argument = json.dumps({"url": bench.url, "name": f"c{number}", "calls": str(folder / "calls"), **options})
        argv = [sys.executable, "-m", "tests.broker.consumer.consumer_process", argument]
        specs.append(ChildSpec(name=f"c{number}", argv=argv, environment={"PYTHONPATH": str(ROOT)}, on_death=record))
    supervisor = Supervisor(specs, backoff=backoff, drain_seconds=drain_seconds)
    with bench.sequencing():
        supervisor.start()
        try:
            yield Workers(bench, folder, supervisor)
        finally:
            supervisor.stop()


def messages(count: int, *, keys: int = 4, deeds: dict[int, str] | None = None) -> list[Message]:
    deeds = deeds or {}
    return [
        Message(topic="orders", key=f"k{n % keys}", body=encode({"n": n, "do": deeds.get(n, "")})) for n in range(count)
    ]


def letters(bench: ConsumptionBench) -> list[Any]:
    return [letter.message_id for letter in dead_letters.list_dead_letters(bench.run, "g")]


def is_done(bench: ConsumptionBench) -> bool:
    return bench.lag("g") == 0 and bench.retrying() == 0


def assert_innocents_took_effect_once(bench: ConsumptionBench, sent: Sequence[Message], guilty: Sequence[int]) -> None:
    expected = Counter(message.message_id for n, message in enumerate(sent) if n not in guilty)
    assert Counter(message_id for *_, message_id in bench.effects()) == expected


def assert_in_order(bench: ConsumptionBench, keys: int = 4) -> None:
    for key in range(keys):
        ns = [n for _, name, n, _ in bench.effects() if name == f"k{key}"]
        assert ns == sorted(ns)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "deed"),
    [
        pytest.param("concurrent", "exit", marks=pytest.mark.slow),
        # An exit code proves nothing: a handler may choose that of a process that has drained, or whose handlers hang.
        ("concurrent", "exit_0"),
        ("concurrent", "exit_hung"),
        ("concurrent", "kill"),
        pytest.param("orderly", "crash", marks=pytest.mark.slow),
        pytest.param("key_ordered", "exit", marks=pytest.mark.slow),
    ],
)
def test_a_killer_is_tried_alone_and_given_up_after_three_deaths(
    orders: ConsumptionBench, tmp_path: Path, mode: str, deed: str
) -> None:
    sent = messages(40, deeds={9: deed})
    orders.publish(sent)
    with working(orders, tmp_path, mode=mode) as workers:
        eventually(lambda: letters(orders), within_seconds=LONG)
        eventually(lambda: is_done(orders), within_seconds=LONG)
        # Once among others, three times alone.
        assert (workers.calls()[9], workers.deaths()) == (4, 4)
    assert letters(orders) == [sent[9].message_id]
    (letter,) = dead_letters.list_dead_letters(orders.run, "g")
    assert letter.error.startswith("KillsItsProcess: this message, tried alone, has killed or hung its process 3 times")
    assert_innocents_took_effect_once(orders, sent, [9])
    if mode != "concurrent":
        assert_in_order(orders)
    assert quarantined(orders) == []
    orders.assert_conserved("g")


@pytest.mark.slow
def test_a_killer_in_a_batch_costs_the_other_messages_no_attempt(orders: ConsumptionBench, tmp_path: Path) -> None:
    sent = messages(64, deeds={9: "kill"})
    orders.publish(sent)
    with working(orders, tmp_path, batch=16, threads=1) as workers:
        eventually(lambda: letters(orders), within_seconds=LONG)
        eventually(lambda: is_done(orders), within_seconds=LONG)
        # Tried together by halves: 16, 8, 4, 2, then three times alone, for any fetched batch.
        assert workers.calls()[9] <= 8
    assert letters(orders) == [sent[9].message_id]
    assert_innocents_took_effect_once(orders, sent, [9])


def test_a_new_process_handles_the_other_messages_first(orders: ConsumptionBench) -> None:
    """A message that kills each process must not be the only one that is handled between two deaths."""
    subscription = Subscription(group="g", topic="orders", threads=1, retry=AT_ONCE)
    orders.runtime((subscription, lambda delivery: None))._session().finish()
    orders.publish(messages(40))
    ((group_id,),) = orders.rows("SELECT group_id FROM outbox.consumer_group")
    first = [log_id for (log_id,) in orders.rows("SELECT log_id FROM outbox.commit_log ORDER BY log_id LIMIT 2")]
    calls = [quarantine.RunningCall(group_id, [log_id], alone=False) for log_id in first]
    quarantine.record_death(orders.run, uuid4(), calls, evidence="c1 on here died", hung=False)
    seen = Seen()
    with orders.running((subscription, seen)):
        eventually(lambda: len(seen.ns) == 40)
    assert sorted(seen.ns[-2:]) == [0, 1]
    assert quarantine.of_groups(orders.run, [group_id]) == {group_id: {}}


def test_a_harmless_message_whose_process_was_killed_from_outside_is_cleared(
    orders: ConsumptionBench, tmp_path: Path
) -> None:
    sent = messages(40)
    orders.publish(sent)
    with working(orders, tmp_path, seconds=0.05) as workers:
        for kills in range(1, 4):
            done, dead = 8 * kills, kills
            eventually(lambda done=done: orders.effect_count() > done, within_seconds=LONG)  # type: ignore[misc]
            os.kill(workers.supervisor.pids()["c1"], signal.SIGKILL)
            eventually(lambda dead=dead: workers.deaths() == dead, within_seconds=LONG)  # type: ignore[misc]
        assert orders.rows("SELECT max(deaths) <= 1 FROM outbox.quarantined_message") in ([(True,)], [(None,)])
        eventually(lambda: is_done(orders), within_seconds=LONG)
        eventually(lambda: quarantined(orders) == [], within_seconds=LONG)
    assert letters(orders) == []
    assert_innocents_took_effect_once(orders, sent, [])


def test_a_requested_end_puts_no_message_into_quarantine(orders: ConsumptionBench, tmp_path: Path) -> None:
    """It is stopped, and killed because it does not end: the running messages are not counted."""
    # All in one queue, so that the other one is given back as soon as the order has arrived.
    orders.publish(messages(8, keys=1, deeds=dict.fromkeys(range(8), "hang")))
    with working(orders, tmp_path, drain_seconds=0.2) as workers:
        eventually(lambda: len(workers.calls()) == 4, within_seconds=LONG)
        # By the supervisor's order …
        workers.supervisor.stop()
    assert (workers.deaths(), quarantined(orders)) == (0, [])
    with working(orders, tmp_path, drain_seconds=0.2) as workers:
        # … and by that of another process, which kills it later.
        pid = eventually(lambda: workers.supervisor.pids().get("c1", 0), within_seconds=LONG)
        eventually(lambda: sum(workers.calls().values()) == 8, within_seconds=LONG)
        os.kill(pid, signal.SIGTERM)
        eventually(lambda: len(orders.owners()) == 1, within_seconds=LONG)
        os.kill(pid, signal.SIGKILL)
        eventually(lambda: workers.supervisor.pids().get("c1", pid) != pid, within_seconds=LONG)
        assert (workers.deaths(), quarantined(orders)) == (0, [])
        workers.supervisor.stop()


# -- handlers that hang -----------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "hanging"),
    [
        *(pytest.param(*given, marks=pytest.mark.soak) for given in (("concurrent", 6), ("orderly", 1))),
        ("key_ordered", 1),
    ],
)
def test_hanging_handlers_end_their_process_and_are_given_up(
    orders: ConsumptionBench, tmp_path: Path, mode: str, hanging: int
) -> None:
    """More than threads can be replaced for; or one, where its line waits for it."""
    guilty = range(hanging)
    sent = messages(40, deeds=dict.fromkeys(guilty, "hang"))
    orders.publish(sent)
    with working(orders, tmp_path, mode=mode, threads=1, timeout_seconds=0.4) as workers:
        eventually(lambda: len(letters(orders)) == hanging, within_seconds=LONG)
        eventually(lambda: is_done(orders), within_seconds=LONG)
        assert workers.deaths() >= 1
    assert sorted(letters(orders)) == sorted(sent[n].message_id for n in guilty)
    assert orders.rows(
        "SELECT DISTINCT detail LIKE 'ended itself because handlers hang (exit code 3)%%'"
        " FROM outbox.incident WHERE kind = 'process_died'"
    ) == [(True,)]
    assert_innocents_took_effect_once(orders, sent, guilty)
    if mode != "concurrent":
        assert_in_order(orders)


def test_a_runtime_whose_handlers_hang_releases_its_queues_and_raises(orders: ConsumptionBench) -> None:
    """Also in another program it neither keeps its leases nor drains for ever."""
    release = threading.Event()
    orders.publish(messages(10))
    subscription = Subscription(group="g", topic="orders", threads=1, timeout_seconds=0.1, retry=AT_ONCE)
    try:
        with pytest.raises(HandlersHung, match="more than 4 handlers of group 'g' hang"):
            orders.runtime((subscription, lambda delivery: release.wait())).run(threading.Event())
    finally:
        release.set()
    assert (orders.owners(), orders.members()) == ({}, 0)
