"""The kit of the blind trial leaves nothing behind."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.sample.conftest import ROOT, running_in
from tests.servers import free_ports
from tests.support import eventually


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_sigterm_ends_the_trial_with_all_of_its_processes(tmp_path: Path) -> None:
    """The control is that its processes run before."""
    [port] = free_ports(1)
    command = [sys.executable, "-m", "tests.sample.blind_trial", "2", f"--port={port}", f"--directory={tmp_path}"]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL) as trial:
        log = tmp_path / "logs" / "forward.log"
        eventually(log.exists, within_seconds=120, what="the last worker")
        assert len(running_in(tmp_path)) > 5
        trial.send_signal(signal.SIGTERM)
        trial.wait(120)
    assert running_in(tmp_path) == []
