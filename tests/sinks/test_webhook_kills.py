"""Receiver and forwarder killed in the middle: every message arrives, in order per key, also if some are sent again."""

from __future__ import annotations

import random
import signal
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.broker.bench import ConsumptionBench, keyed
from tests.servers import free_ports
from tests.sinks.conftest import Spawn
from tests.sinks.receiver import SECRET
from tests.sinks.support import GROUP, assert_all_in_order, lines
from tests.support import eventually

SINK = "outbox.contrib.forwarding.sinks.webhook.WebhookSink"
OPTIONS = {"secrets": [SECRET], "allow_private": True, "allow_http": True, "timeout_seconds": 5}


@pytest.mark.slow
def test_receiver_and_forwarder_killed_and_started_again(bench: ConsumptionBench, spawn: Spawn, tmp_path: Path) -> None:
    storm(bench, spawn, tmp_path / "received", count=300, kills=[60, 150])


@pytest.mark.soak
def test_many_kills(bench: ConsumptionBench, spawn: Spawn, tmp_path: Path) -> None:
    storm(bench, spawn, tmp_path / "received", count=6000, kills=sorted(random.sample(range(100, 5900), 20)))


def storm(bench: ConsumptionBench, spawn: Spawn, file: Path, *, count: int, kills: Sequence[int]) -> None:
    """Kills the receiver when so many have arrived, and the forwarder right after an acknowledgement."""
    bench.declare("orders")
    sent = keyed("orders", count, 12)
    bench.publish(sent)
    port = free_ports(1)[0]
    options = {"url": f"http://127.0.0.1:{port}/", **OPTIONS}
    given = {"url": bench.url, "sink": SINK, "topic": "orders", "options": options}
    receiver = spawn("tests.sinks.receiver", str(port), str(file), SECRET)
    forwarder = spawn("tests.sinks.forward_process", given, faults="forward.after_acknowledgement=kill@20")
    with bench.sequencing():
        assert forwarder.wait(60) == -signal.SIGKILL
        spawn("tests.sinks.forward_process", given)
        for at in kills:
            eventually(lambda at=at: len(lines(file)) >= at, within_seconds=120)  # type: ignore[misc]
            receiver.kill()
            receiver.wait()
            receiver = spawn("tests.sinks.receiver", str(port), str(file), SECRET)
        eventually(lambda: bench.lag(GROUP) == 0, within_seconds=120, what="everything is acknowledged")
    arrived = lines(file)
    assert_all_in_order(arrived, sent)
    assert len(arrived) > len(sent), "messages acknowledged to the killed forwarder came again"
    bench.assert_conserved(GROUP)
