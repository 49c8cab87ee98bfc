"""How many Python frames a message costs to which nothing special happens. No part takes part in it.

Time is not measured: on a busy machine, only counts say whether a change made a message cheaper. A frame is also
counted when a generator continues. The figures of this test are those of Python 3.11, Django and psycopg included;
later versions of Python take fewer frames. test_publish_cost.py and test_inbox_round_trips.py count the statements.
"""

from __future__ import annotations

import statistics
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import pytest
from django.db import connections, transaction

import outbox
from outbox import Delivery
from outbox.contrib.django import publish, subscriber
from outbox.contrib.django.engine.broker import flush, get_engine
from outbox.contrib.django.subscribers.registry import subscriptions
from tests.support import eventually

pytestmark = pytest.mark.usefixtures("no_subscribers")


PACKAGE = Path(outbox.__file__).parent


class Files:
    """Counts the frames of outbox's own files in this thread."""

    def __init__(self) -> None:
        self.frames: Counter[str] = Counter()

    def __call__(self, frame: FrameType, event: str, arg: object) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(PACKAGE):
            self.frames[path.relative_to(PACKAGE).as_posix()] += 1

    @contextmanager
    def in_this_thread(self) -> Iterator[None]:
        sys.setprofile(self)
        try:
            yield
        finally:
            sys.setprofile(None)


class Frames:
    """Counts the frames of a thread, or of all threads that start while it is installed for them."""

    def __init__(self) -> None:
        self.number = 0

    def __call__(self, frame: FrameType, event: str, arg: object) -> None:
        if event == "call":
            self.number += 1

    @contextmanager
    def in_this_thread(self) -> Iterator[None]:
        sys.setprofile(self)
        try:
            yield
        finally:
            sys.setprofile(None)

    @contextmanager
    def in_new_threads(self) -> Iterator[None]:
        threading.setprofile(self)
        try:
            yield
        finally:
            threading.setprofile(None)


def order(number: int) -> None:
    with transaction.atomic():
        publish("orders", {"number": number}, key=str(number))


# In a block with nothing but the publish call, without the 80 frames of Django's empty block, but with BEGIN, which an
# empty block does not send. With all aliases, the guard of the running test and BEGIN by psycopg, it was 175 and 409.
# Before publish compared what it had read instead of reading it again, it was 104 and 240.
PUBLISH = {"atomic": 65, "two_phase": 166}


def test_a_publish_call(path: str) -> None:
    for number in range(6):
        order(number)
    assert flush(within_seconds=30)
    with transaction.atomic():
        connections["default"].ensure_connection()
    empty, publishing = Frames(), Frames()
    with empty.in_this_thread():
        for _ in range(10):
            with transaction.atomic():
                pass
    with publishing.in_this_thread():
        for number in range(10):
            order(number)
    assert flush(within_seconds=30)
    assert (publishing.number - empty.number) / 10 <= PUBLISH[path]


# The files with frames of the call, from `publish` to the stored message, those with the most frames first. In a test,
# in_tests.py and django_internals.py have one each, too. Before publish.py had the whole way, it was 19 and 28 files.
FILES = {
    "atomic": (
        *("contrib/django/publishing/publish.py", "broker/database/sender.py", "broker/log/commit_log.py"),
        *("codec.py", "broker/database/statement.py", "contrib/django/engine/broker.py", "utils/ids.py", "message.py"),
        *("contrib/django/database/transactions.py", "broker/log/topics.py", "topic.py", "broker/database/executor.py"),
    ),
    "two_phase": (
        *("broker/database/sender.py", "contrib/django/publishing/publish.py", "broker/database/connection.py"),
        *("broker/postgres.py", "contrib/django/database/transactions.py", "contrib/django/ledger/ledger.py"),
        *("broker/database/statement.py", "broker/log/commit_log.py", "codec.py", "topic.py", "utils/ids.py"),
        *("contrib/django/engine/broker.py", "message.py", "contrib/django/database/aliases.py"),
        *("contrib/django/engine/engine.py", "broker/database/executor.py", "broker/log/topics.py"),
        "broker/log/failing.py",
    ),
}
IN_TESTS = {"contrib/django/database/in_tests.py", "contrib/django/database/django_internals.py"}
# How many of these files have at least this share of the frames together.
SHARES = {"atomic": (3, 0.6), "two_phase": (5, 0.65)}


def test_the_files_of_a_publish_call(path: str) -> None:
    for number in range(6):
        order(number)
    assert flush(within_seconds=30)
    files = Files()
    # The beginning and the end of the block are not counted.
    with transaction.atomic(), files.in_this_thread():
        publish("orders", {"number": 0}, key="0")
    assert flush(within_seconds=30)
    found = Counter({name: frames for name, frames in files.frames.items() if name not in IN_TESTS})
    assert set(found) <= set(FILES[path])
    first, share = SHARES[path]
    assert sum(found[name] for name in FILES[path][:first]) >= share * sum(found.values())


def test_a_message_in_the_worker(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a worker that leads: tick, fetch, call of the handler, inbox, stored offset."""
    # A result is collected with the next message, and an offset is stored each time. Otherwise a machine that needs
    # longer than 50 ms for a message would take a step more for it.
    monkeypatch.setattr("outbox.broker.consumer.scheduler.COLLECT_SECONDS", 60.0)
    monkeypatch.setattr("outbox.broker.consumer.dispatcher.STORE_SECONDS", 0.0)
    handled: list[int] = []

    @subscriber("orders", group="effects", threads=1)
    def effect(given: Delivery) -> None:
        handled.append(given.body["number"])

    frames, stop = Frames(), threading.Event()
    consumer = threading.Thread(target=get_engine().consumers(subscriptions(), leads=True).run, args=(stop,))

    def frames_of_one() -> int:
        began, count = frames.number, len(handled)
        order(count)
        eventually(lambda: len(handled) > count)
        return frames.number - began

    with frames.in_new_threads():
        consumer.start()
        try:
            for _ in range(10):
                frames_of_one()
            # Heartbeats and the passes of maintenance come in addition to some of the messages.
            found = statistics.median(frames_of_one() for _ in range(60))
        finally:
            stop.set()
            consumer.join(30)
    # It was 758 (atomic) and 782 (two-phase) before a step of the dispatching thread looked only at what had changed,
    # 669 before a feature that is off cost no frame, 511 before a tick told its own process what has grown, and 475
    # before a round trip reused its adapters. Since then without a step of its own for the result, which is 35 frames.
    assert found <= 410
