"""Order on FIFO topics is the order of local commits under the key lock, and another one without it."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
from django.db import connections, transaction

from outbox.broker.leading import Sequencer
from outbox.contrib.django import publish
from outbox.contrib.django.database.aliases import broker_connection, broker_database
from outbox.contrib.django.engine.broker import flush
from tests.django.configured import OUTBOX

pytestmark = pytest.mark.usefixtures("empty_log")


class Race:
    """Two transactions on one key: `first` draws its log position first; the test chooses which commits first."""

    def __init__(self, pool: ThreadPoolExecutor) -> None:
        self._pool = pool
        self.published = {name: threading.Event() for name in ("first", "second")}
        self._go = {name: threading.Event() for name in ("first", "second")}
        self._futures: dict[str, Future[None]] = {}
        self.committed: list[str] = []

    def start(self, name: str) -> None:
        self._futures[name] = self._pool.submit(self._run, name)

    def _run(self, name: str) -> None:
        try:
            with transaction.atomic():
                publish("steps", {"by": name}, key="a", tag=name)
                self.published[name].set()
                assert self._go[name].wait(20)
            self.committed.append(name)
        finally:
            connections.close_all()

    def commit(self, name: str) -> None:
        self._go[name].set()
        self._futures[name].result(20)


@pytest.fixture
def race(django_db_blocker: Any) -> Iterator[Race]:
    with ThreadPoolExecutor(2) as pool:
        yield Race(pool)


def queued() -> list[str]:
    """The publishers, in the order that consumers will see."""
    assert flush(within_seconds=10)
    with broker_connection() as (connection, _):
        sequencer = Sequencer(broker_database(), uuid.uuid4())
        while (counts := sequencer.run_once(connection)).ticked or counts.more:
            pass
        rows = connection.execute(
            "SELECT tag FROM outbox.consume_queue JOIN outbox.commit_log USING (log_id) WHERE key = 'a'"
            " ORDER BY queue_id, queue_offset"
        ).fetchall()
    return [row[0] for row in rows]


@contextmanager
def key_lock_off(outbox_settings: Callable[..., None]) -> Iterator[None]:
    topics = {**OUTBOX["TOPICS"], "steps": {"types": ["FIFO", "TRANSACTION"], "queue_count": 4, "key_lock": False}}
    outbox_settings(TOPICS=topics)
    switch = "UPDATE outbox.topic SET key_lock = %s WHERE name = 'steps'"
    with broker_connection() as (connection, _):
        connection.execute(switch, [False])
        try:
            yield
        finally:
            connection.execute(switch, [True])


def test_queue_order_is_commit_order(path: str, race: Race) -> None:
    race.start("first")
    assert race.published["first"].wait(10)
    race.start("second")
    assert not race.published["second"].wait(0.3), "the second transaction did not wait for the key"
    race.commit("first")
    race.commit("second")
    assert queued() == race.committed == ["first", "second"]


def test_a_process_that_was_started_before_the_topic_became_fifo_waits_for_the_key(
    path: str, race: Race, outbox_settings: Callable[..., None]
) -> None:
    """A deployment changes the topic in the broker first, and then restarts one process after the other."""
    outbox_settings(TOPICS={**OUTBOX["TOPICS"], "steps": {"queue_count": 4}})
    with transaction.atomic():
        publish("steps", {}, key="b")
    test_queue_order_is_commit_order(path, race)


def test_control_without_the_key_lock_the_order_is_inverted(
    path: str, race: Race, outbox_settings: Callable[..., None]
) -> None:
    with key_lock_off(outbox_settings):
        for name in ("first", "second"):
            race.start(name)
            assert race.published[name].wait(10)
        race.commit("second")
        race.commit("first")
        assert race.committed == ["second", "first"]
        assert queued() == ["first", "second"]
