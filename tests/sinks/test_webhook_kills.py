"""Receiver and forwarder killed in the middle: every message arrives, in order per key, also if some are sent again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.broker.bench import ConsumptionBench
from tests.servers import free_ports
from tests.sinks.conftest import Spawn
from tests.sinks.receiver import SECRET
from tests.sinks.support import lines, storm

SINK = "outbox.contrib.forwarding.sinks.webhook.WebhookSink"
OPTIONS = {"secrets": [SECRET], "allow_private": True, "allow_http": True, "timeout_seconds": 5}


@pytest.mark.slow
@pytest.mark.parametrize("kills", [2, pytest.param(20, marks=pytest.mark.soak)])
def test_receiver_and_forwarder_killed_and_started_again(
    bench: ConsumptionBench, spawn: Spawn, tmp_path: Path, kills: int
) -> None:
    file, port = tmp_path / "received", free_ports(1)[0]

    def receiving() -> None:
        receivers.append(spawn("tests.sinks.receiver", str(port), str(file), SECRET))

    def restart() -> None:
        receivers[-1].kill()
        receivers[-1].wait()
        receiving()

    receivers: list[Any] = []
    receiving()
    given = {"sink": SINK, "options": {"url": f"http://127.0.0.1:{port}/", **OPTIONS}}
    again = storm(bench, spawn, given, lambda: lines(file), restart, kills, size=300)
    assert again > 0, "messages acknowledged to the killed forwarder came again"
