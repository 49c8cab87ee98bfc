"""Shared helpers of the sinks' tests: messages to send, and checks of the received ones."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from outbox.message import Delivery, Message
from tests.broker.bench import ConsumptionBench, keyed
from tests.sinks.conftest import Spawn
from tests.support import eventually

GROUP = "forward"


def delivery(
    key: str = "k", *, body: bytes = b'{"n": 1}', content_type: str = "application/json", **of: Any
) -> Delivery:
    """One delivery of a new message."""
    message = Message(
        topic="orders", key=key, body=body, content_type=content_type, born_at=datetime(2026, 1, 2, tzinfo=UTC), **of
    )
    return Delivery(message=message, body=body, group=GROUP, queue="orders/0", offset=0)


def lines(file: Path) -> list[dict[str, Any]]:
    """The notes of a receiver, one JSON object per line."""
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def firsts(arrived: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Without repetitions, which at-least-once allows: the first arrival of each id."""
    return list({entry["id"]: entry for entry in reversed(list(arrived))}.values())[::-1]


def assert_all_in_order(arrived: Sequence[dict[str, Any]], sent: Sequence[Message]) -> None:
    """The same set, and of each key in the order of publishing."""
    first = firsts(arrived)
    assert {entry["id"] for entry in first} == {str(message.message_id) for message in sent}
    by_key: dict[str, list[int]] = {}
    for entry in first:
        by_key.setdefault(entry["key"], []).append(entry["n"])
    assert {key: ns for key, ns in by_key.items() if ns != sorted(ns)} == {}


def storm(
    bench: ConsumptionBench,
    spawn: Spawn,
    given: Mapping[str, Any],
    arrived: Callable[[], Sequence[dict[str, Any]]],
    restart: Callable[[], None],
    kills: int,
    *,
    size: int = 600,
) -> int:
    """The forwarder dies right after an acknowledgement, and the server in the middle, so many times.

    Return how many messages came again.
    """
    bench.declare("orders")
    given = {"url": bench.url, "topic": "orders", **given}
    forwarder = spawn("tests.sinks.forward_process", given, faults="forward.after_acknowledgement=kill@10")
    sent: list[Message] = []
    with bench.sequencing():
        for number in range(kills):
            sent += keyed("orders", size, 12, start=len(sent))
            bench.publish(sent[-size:])
            if number == 0:
                # It may be dead before it has stored how far it came.
                assert forwarder.wait(120) == -signal.SIGKILL
            else:
                eventually(lambda: bench.lag(GROUP) < size * 0.9, within_seconds=120, what="some are forwarded")
            spawn("tests.sinks.forward_process", given)
            restart()
        eventually(lambda: bench.lag(GROUP) == 0, within_seconds=180, what="everything is acknowledged")
    found = arrived()
    assert_all_in_order(found, sent)
    bench.assert_conserved(GROUP)
    return len(found) - len(sent)
