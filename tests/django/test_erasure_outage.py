"""A worker that cannot compare the list of erasures waits for its database, and stays live."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from django.db import OperationalError

from outbox.contrib.django.operations import erasing
from outbox.contrib.django.worker.workers import wait_for_erasures
from outbox.errors import BrokerUnavailable, OutboxError
from outbox.utils import heartbeat


def test_a_worker_waits_for_its_databases_with_heartbeats(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    beats = tmp_path / "consumer.alive"
    monkeypatch.setenv(heartbeat.VARIABLE, str(beats))
    errors: list[Exception] = [BrokerUnavailable("the broker is down"), OperationalError("the shop is down")]
    found: list[heartbeat.SignOfLife] = []

    def repeat() -> None:
        if errors:
            raise errors.pop(0)
        found.append(heartbeat.listen(beats))

    monkeypatch.setattr(erasing, "repeat_erasures", repeat)
    wait_for_erasures(threading.Event())
    assert [(one.is_alive(within_seconds=30), one.is_ready) for one in found] == [(True, False)]


def test_a_worker_that_waits_can_be_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    stop = threading.Event()

    def repeat() -> None:
        stop.set()
        raise BrokerUnavailable("the broker is down")

    monkeypatch.setattr(erasing, "repeat_erasures", repeat)
    wait_for_erasures(stop)


def test_a_list_that_cannot_be_read_ends_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    def repeat() -> None:
        raise OutboxError("the list of erasures cannot be read")

    monkeypatch.setattr(erasing, "repeat_erasures", repeat)
    with pytest.raises(OutboxError, match="cannot be read"):
        wait_for_erasures(threading.Event())
