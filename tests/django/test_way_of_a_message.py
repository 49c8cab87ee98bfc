"""Which files a reader has to read to follow an atomic message from the tick of the leader to the stored offset.

The frames of Python say which code runs for a message. A file with few of them is not needed to understand the way.
"""

from __future__ import annotations

import threading
from collections import Counter
from pathlib import Path
from types import CodeType, FrameType

import pytest
from django.db import transaction

import outbox
from outbox import Delivery
from outbox.contrib.django import publish, subscriber
from outbox.contrib.django.engine.broker import get_engine
from outbox.contrib.django.subscribers.registry import subscriptions
from tests.support import eventually

pytestmark = [pytest.mark.usefixtures("no_subscribers"), pytest.mark.parametrize("path", ["atomic"], indirect=True)]

PACKAGE = Path(outbox.__file__).parent
MESSAGES = 40

# In the order of the way. The first tuple belongs to the way, the second one is used by the whole package.
WAY = (
    "broker/leading.py",
    "broker/sequencer/key_order.py",
    "broker/consumer/dispatcher.py",
    "broker/consumer/fetch.py",
    "broker/consumer/lanes.py",
    "broker/consumer/scheduler.py",
    "broker/consumer/subscription_runner.py",
    "broker/consumer/call.py",
    "contrib/django/subscribers/inbox.py",
    "broker/consumer/owned_queue.py",
)
USED_EVERYWHERE = (
    "broker/database/",
    "contrib/django/database/",
    "utils/",
)


def test_few_files_are_the_way_of_a_message(path: str) -> None:
    handled: list[int] = []
    frames: Counter[CodeType] = Counter()
    is_counting = False

    @subscriber("orders", group="effects", threads=1)
    def effect(given: Delivery) -> None:
        handled.append(given.body["number"])

    def count(frame: FrameType, event: str, arg: object) -> None:
        # Not the heartbeats of the coordinator, nor the background work of the leader.
        if event == "call" and is_counting and threading.current_thread().name.startswith(("consumer", "effects-")):
            frames[frame.f_code] += 1

    def handle(number: int) -> None:
        with transaction.atomic():
            publish("orders", {"number": number})
        eventually(lambda: len(handled) > number)

    stop = threading.Event()
    run = get_engine().consumers(subscriptions(), leads=True).run
    consumer = threading.Thread(target=run, args=(stop,), name="consumer")
    threading.setprofile(count)
    try:
        consumer.start()
        for number in range(10):
            handle(number)
        is_counting = True
        for number in range(10, 10 + MESSAGES):
            handle(number)
        is_counting = False
    finally:
        threading.setprofile(None)
        stop.set()
        consumer.join(30)
    own: Counter[str] = Counter()
    for code, number in frames.items():
        file = Path(code.co_filename)
        if file.is_relative_to(PACKAGE):
            own[file.relative_to(PACKAGE).as_posix()] += number
    way = Counter({name: number for name, number in own.items() if not name.startswith(USED_EVERYWHERE)})
    shares = {name: round(number / way.total(), 3) for name, number in way.most_common()}
    assert sum(way[name] for name in WAY) >= 0.9 * way.total(), shares
    # Each file of the list is on the way of each message. How large its share is depends on the machine: an idle moment
    # has frames too.
    assert all(way[name] >= MESSAGES for name in WAY), way
