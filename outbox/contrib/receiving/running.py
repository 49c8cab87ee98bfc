"""Runs the entries of OUTBOX['RECEIVE'] for `outbox_worker --role receive`.

Each entry stores foreign messages in a topic.
"""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Final, cast

from outbox.contrib.django.database.in_tests import refuse_processes_in_tests
from outbox.contrib.django.engine.broker import engine_of, get_broker
from outbox.contrib.django.settings.conf import chosen, get_settings, imported, made, settings_of
from outbox.contrib.django.worker import probes
from outbox.contrib.receiving.actions import PASS_PREFIX
from outbox.contrib.receiving.settings import DeclaredReceive, ReceiveSettings
from outbox.contrib.receiving.sources.receiver import Received, Receiver
from outbox.contrib.receiving.sources.source import Convert, Source, convert
from outbox.errors import BrokerError
from outbox.utils import heartbeat

logger = logging.getLogger(__name__)

# A receiver reports to the broker at this interval that it runs.
ROUND_SECONDS: Final = 30.0
_PURPOSE: Final = (
    "to receive: {'partner': {'source': 'kombu', 'topic': 'partner.orders', "
    "'options': {'url': 'amqp://…', 'queue': 'orders'}}}"
)


def run_receive(stop: threading.Event, names: Sequence[str] = ()) -> None:
    """Store the foreign messages of the given entries (by default all entries) until `stop` is set.

    If the receiver of one entry fails, all receivers end. Raises the error of the entry that failed.
    """
    refuse_processes_in_tests()
    failed: list[BaseException] = []

    def receive(receiver: Receiver, rounds: ReceiverHeartbeat) -> None:
        try:
            receiver.run(stop, on_round=rounds.note)
        except BaseException as error:
            failed.append(error)
            stop.set()

    with receiving(names) as receivers:
        rounds = {name: ReceiverHeartbeat(name) for name in receivers}
        threads = [
            threading.Thread(target=receive, args=[one, rounds[name]], name=f"receive-{name}")
            for name, one in receivers.items()
        ]
        try:
            for thread in threads:
                thread.start()
            while not stop.wait(1.0):
                heartbeat.beat(ready=all(one.is_recent() for one in rounds.values()))
        finally:
            # The process ends only after these threads.
            stop.set()
        for thread in threads:
            thread.join()
    if failed:
        raise failed[0]


class ReceiverHeartbeat:
    """Reports to the probe of this process, and to the broker, that a receiver runs (condition `receiver_late`)."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._at = self._told_at = -math.inf

    def note(self) -> None:
        """Record a completed round of the receiver."""
        self._at = time.monotonic()
        if self._at - self._told_at < ROUND_SECONDS / 2:
            return
        self._told_at = self._at
        group = get_settings().producer_group
        try:
            get_broker().take_turn(group, f"{PASS_PREFIX}{self._name}", interval_seconds=ROUND_SECONDS, rest_seconds=0)
        except BrokerError as error:
            logger.warning("the broker could not record that the receiver %r runs: %s", self._name, error)

    def is_recent(self) -> bool:
        """Whether the receiver has recently completed a round."""
        return time.monotonic() - self._at < probes.LIVE_SECONDS


def receive_once(*, names: Sequence[str] = (), wait_seconds: float = 2.0) -> Received:
    """Store foreign messages until no message comes for `wait_seconds`.

    Raises the errors of `run_receive`, and ServiceUnavailable.
    """
    total = Received()
    with receiving(names) as receivers:
        for receiver in receivers.values():
            while (done := receiver.run_once(wait_seconds=wait_seconds)) != Received():
                total.stored += done.stored
                total.put_aside += done.put_aside
    return total


def receive_and_say(names: Sequence[str]) -> str:
    """Do what `receive_once` does, and return the counts as a text."""
    received = receive_once(names=names)
    return f"{received.stored} messages stored, {received.put_aside} put into the poison topic"


@contextlib.contextmanager
def receiving(names: Sequence[str]) -> Iterator[Mapping[str, Receiver]]:
    """Yield a mapping from names to receivers, for the `with` block.

    The sources of the receivers are closed at the end of the `with` block.
    """
    engine_of(get_settings()).require()
    declared_here = settings_of(ReceiveSettings).receive
    with contextlib.ExitStack() as sources:
        receivers = {}
        for name, declared in chosen("OUTBOX['RECEIVE']", declared_here, names, _PURPOSE).items():
            where = f"OUTBOX['RECEIVE'][{name!r}]"
            source = cast(Source, made(where, imported(f"{where}['source']", declared.source), declared.options))
            sources.callback(source.close)
            receivers[name] = Receiver(
                source,
                get_broker(),
                name=name,
                topic=declared.topic,
                poison_topic=declared.poison_topic,
                convert=_convert(where, declared),
                batch=declared.batch,
            )
        yield receivers


def _convert(where: str, declared: DeclaredReceive) -> Convert:
    path = declared.convert
    return convert if path is None else cast(Convert, imported(f"{where}['convert']", path))
