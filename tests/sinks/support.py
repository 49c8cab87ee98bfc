"""Shared helpers of the sinks' tests: messages to send, and checks of the received ones."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from outbox.message import Delivery, Message

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
