"""One small run of the demo, left open, for all tests of it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import eventually

ROOT = Path(__file__).resolve().parent.parent.parent
ORDERS = 48


def running_in(directory: Path) -> list[str]:
    """The command lines of the processes of a run in this directory."""
    needle = f"OUTBOX_DEMO_DIR={directory}".encode()
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if needle in (folder / "environ").read_bytes().split(b"\0"):
                found.append((folder / "cmdline").read_bytes().replace(b"\0", b" ").decode())
        except OSError:
            continue
    return found


class DemoRun:
    """The demo as a process of its own, with what it printed so far."""

    def __init__(self, directory: Path, *arguments: str, **environment: str) -> None:
        self.directory = directory
        kept = {name: value for name, value in os.environ.items() if name not in ("OUTBOX_POSTGRES_URL", "KEEP")}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "sample_project.demo", "--no-reconcile", *arguments],
            cwd=ROOT,
            env={**kept, "OUTBOX_DEMO_DIR": str(directory), "COLUMNS": "120", **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self._lines: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def output(self) -> str:
        """Everything printed so far."""
        return "".join(self._lines)

    def wait_for(self, pattern: str, *, within_seconds: float) -> re.Match[str]:
        """Wait until the output matches; AssertionError with the output when the process ends before."""

        def found() -> re.Match[str] | None:
            match = re.search(pattern, self.output)
            if match is None and self.process.poll() is not None:
                self._reader.join(5)
                match = re.search(pattern, self.output)
                assert match, f"the demo ended ({self.process.returncode}) without {pattern!r}:\n{self.output}"
            return match

        match = eventually(found, within_seconds=within_seconds, what=f"{pattern} in the demo's output")
        assert match is not None
        return match

    @property
    def site(self) -> str:
        """The address of the open shop."""
        return self.wait_for(r"the shop is open at (http://\S+?)/?;", within_seconds=1)[1]

    def end(self, number: signal.Signals = signal.SIGINT) -> int:
        """Interrupt it and wait; returns the exit code."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        code = self.process.wait(60)
        self._reader.join(5)
        assert self.process.stdout is not None
        self.process.stdout.close()
        return code

    def left_running(self) -> list[str]:
        """The command lines of processes that still belong to the run."""
        return running_in(self.directory)

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.append(line)


@pytest.fixture(scope="package")
def open_demo() -> Iterator[DemoRun]:
    """A finished run whose shop is still open."""
    with tempfile.TemporaryDirectory(prefix="outbox-demo-", ignore_cleanup_errors=True) as folder:
        run = DemoRun(Path(folder), f"--orders={ORDERS}", "--shoppers=4", "--keep")
        try:
            run.wait_for(r"the shop is open at http://\S+", within_seconds=110)
            yield run
        finally:
            code = run.end()
        assert code == 0, run.output
        assert run.left_running() == []
