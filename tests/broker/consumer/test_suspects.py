"""Messages that kill or hang their process are found out, in real processes under a real supervisor."""

from __future__ import annotations

import contextlib
import functools
import json
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from outbox.backoff import Backoff
from outbox.broker import deaths
from outbox.broker.groups import suspects
from outbox.broker.operations import dead_letters
from outbox.broker.supervisor import ChildSpec, Supervisor
from outbox.message import Message
from tests.broker.bench import FIFO, ROOT, ConsumptionBench, encode
from tests.support import eventually

SOON = Backoff(first_seconds=0.05, longest_seconds=0.2)
LONG = 90.0


@pytest.fixture
def orders(bench: ConsumptionBench) -> ConsumptionBench:
    bench.declare("orders", queues=2, types=FIFO)
    return bench


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
def working(bench: ConsumptionBench, folder: Path, *, count: int = 1, **options: Any) -> Iterator[Workers]:
    """So many consumer processes under a supervisor, and a broker process's loop."""
    record = functools.partial(deaths.record, bench.database)
    specs = []
    for number in range(1, count + 1):
        argument = json.dumps({"url": bench.url, "name": f"c{number}", "calls": str(folder / "calls"), **options})
        argv = [sys.executable, "-m", "tests.broker.consumer.killer_process", argument]
        specs.append(ChildSpec(name=f"c{number}", argv=argv, environment={"PYTHONPATH": str(ROOT)}, on_death=record))
    supervisor = Supervisor(specs, backoff=SOON)
    with bench.sequencing():
        supervisor.start()
        try:
            yield Workers(bench, folder, supervisor)
        finally:
            supervisor.stop(grace_seconds=20)


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


@pytest.mark.parametrize(
    ("mode", "deed"),
    [("concurrent", "exit"), ("concurrent", "kill"), ("orderly", "crash"), ("key_ordered", "exit")],
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
    assert letter.error.startswith("KillsItsProcess: its process died while it was handled alone 3 times")
    assert_innocents_took_effect_once(orders, sent, [9])
    if mode != "concurrent":
        assert_in_order(orders)
    assert suspects.list_suspects(orders.run) == []
    orders.assert_conserved("g")
