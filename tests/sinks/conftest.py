"""A broker to forward from."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.broker.bench import ROOT
from tests.broker.conftest import bench

__all__ = ["bench"]

Spawn = Callable[..., "subprocess.Popen[bytes]"]


@pytest.fixture
def spawn() -> Iterator[Spawn]:
    """Starts Python modules with arguments; JSON for those that are no texts. Ends them after the test."""
    started: list[subprocess.Popen[bytes]] = []

    def start(module: str, *arguments: Any, faults: str = "") -> subprocess.Popen[bytes]:
        texts = [given if isinstance(given, str) else json.dumps(given) for given in arguments]
        environment = {**os.environ, "OUTBOX_FAULTS": faults, "PYTHONPATH": str(ROOT)}
        started.append(subprocess.Popen([sys.executable, "-m", module, *texts], env=environment, cwd=ROOT))
        return started[-1]

    yield start
    for process in started:
        process.send_signal(signal.SIGTERM)
    for process in started:
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
