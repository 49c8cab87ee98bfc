"""What `outbox_receive` runs: the entries of OUTBOX['RECEIVE'], each storing what others have sent in a topic."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Final, cast

from outbox import heartbeat
from outbox.contrib.django.database.in_tests import refuse_processes_in_tests
from outbox.contrib.django.engine.broker import get_broker
from outbox.contrib.django.settings.conf import get_settings, imported
from outbox.contrib.django.settings.receive_rules import DeclaredReceive
from outbox.contrib.django.settings.setting_rules import chosen
from outbox.contrib.django.worker import probes
from outbox.contrib.django.worker.forwarding import made
from outbox.contrib.sources.receiver import Received, Receiver
from outbox.contrib.sources.source import Convert, Source, convert

_PURPOSE: Final = (
    "to receive: {'partner': {'source': 'kombu', 'topic': 'partner.orders', "
    "'options': {'url': 'amqp://…', 'queue': 'orders'}}}"
)


def run_receive(stop: threading.Event, *, names: Sequence[str] = ()) -> None:
    """Receive for the entries named, by default all, until `stop`. Raises what ends one of them: then all end."""
    refuse_processes_in_tests()
    failed: list[BaseException] = []

    def receive(receiver: Receiver) -> None:
        try:
            receiver.run(stop)
        except BaseException as error:
            failed.append(error)
            stop.set()

    with probes.alone("receive"), receiving(names) as receivers:
        threads = [
            threading.Thread(target=receive, args=[one], name=f"receive-{name}") for name, one in receivers.items()
        ]
        for thread in threads:
            thread.start()
        while not stop.wait(1.0):
            heartbeat.beat(ready=True)
        for thread in threads:
            thread.join()
    if failed:
        raise failed[0]


def receive_once(*, names: Sequence[str] = (), wait_seconds: float = 2.0) -> Received:
    """Receive until nothing has come for so long. Raises like `run_receive`, and ServiceUnavailable."""
    total = Received()
    with receiving(names) as receivers:
        for receiver in receivers.values():
            while (done := receiver.run_once(wait_seconds=wait_seconds)) != Received():
                total.stored += done.stored
                total.put_aside += done.put_aside
    return total


@contextlib.contextmanager
def receiving(names: Sequence[str]) -> Iterator[Mapping[str, Receiver]]:
    """The receivers by name; their sources are closed at the end of the block."""
    with contextlib.ExitStack() as sources:
        receivers = {}
        for name, declared in chosen("OUTBOX['RECEIVE']", get_settings().receive, names, _PURPOSE).items():
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
