"""Version 0.1 as its users have it: the wheel of its commit, unpacked, to be run together with the present code."""

from __future__ import annotations

import contextlib
import io
import os
import signal
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from tests.support import eventually

ROOT: Final = Path(__file__).resolve().parents[3]
COMMIT: Final = "9e02822"
# The checksum of every released file of the schema: changes come as further files.
SCHEMA_SHA256: Final = {"0001_initial.sql": "567ba82c0e1aa38c9b8804958a08bd0b4a7c65d645baf218a3a402558f53876a"}


def unpack(target: Path) -> Path:
    """Build the wheel of version 0.1 and unpack it; skips where the checkout lacks that commit."""
    archive = subprocess.run(["git", "archive", COMMIT], cwd=ROOT, capture_output=True, check=False)
    if archive.returncode != 0:
        pytest.skip(f"version 0.1 (commit {COMMIT}) is not in this checkout: fetch the whole history to test upgrades")
    source = target / "source"
    with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as files:
        files.extractall(source, filter="data")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(target)]
    built = subprocess.run(command, cwd=source, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stdout + built.stderr
    (wheel,) = target.glob("*.whl")
    with zipfile.ZipFile(wheel) as files_of_wheel:
        files_of_wheel.extractall(target / "0.1")
    return target / "0.1"


class Processes:
    """Processes of tests/broker/schema/version_process.py, of one version or another; they log into `folder`."""

    def __init__(self, url: str, folder: Path) -> None:
        self._url = url
        self._folder = folder
        self._running: list[tuple[subprocess.Popen[bytes], Path, Path]] = []

    def start(self, path: Path, *roles: str) -> None:
        """Start one process per role with the code in `path`, and wait until all of them run."""
        logs = []
        for role in roles:
            log = self._folder / f"{len(list(self._folder.iterdir()))}-{role}.log"
            script = Path(__file__).with_name("version_process.py")
            with log.open("wb") as output:
                process = subprocess.Popen(
                    [sys.executable, str(script), role, self._url],
                    env={**os.environ, "PYTHONPATH": str(path)},
                    stdout=output,
                    stderr=output,
                )
            self._running.append((process, log, path))
            logs.append(log)
        for log in logs:
            eventually(log.read_text, within_seconds=60, what=f"{log.name} has begun")

    def run(self, path: Path, role: str) -> None:
        """Run one role to its end."""
        self.start(path, role)
        process, log, _ = self._running.pop()
        assert process.wait(60) == 0, log.read_text()

    def killed_by(self, path: Path, role: str, faults: str) -> None:
        """Run one role with faults, until one of them has killed it."""
        before = os.environ.get("OUTBOX_FAULTS", "")
        os.environ["OUTBOX_FAULTS"] = faults
        try:
            self.start(path, role)
        finally:
            os.environ["OUTBOX_FAULTS"] = before
        process, log, _ = self._running.pop()
        try:
            assert process.wait(60) == -signal.SIGKILL, log.read_text()
        finally:
            process.kill()

    def stop(self, *, path: Path | None = None, role: str = "") -> None:
        """End all processes (of one version, of one role); none may have died, lacked a table or run another code."""
        ending = [one for one in self._running if path in (None, one[2]) and one[1].name.endswith(f"{role}.log")]
        self._running = [one for one in self._running if one not in ending]
        for process, log, _ in ending:
            assert process.poll() is None, f"{log.name} died: {log.read_text()}"
            process.terminate()
        for process, log, code in ending:
            assert process.wait(60) == 0, log.read_text()
            first, _, rest = log.read_text().partition("\n")
            assert Path(first).is_relative_to(code), f"{log.name} ran {first}"
            assert "Traceback" not in rest and "interrupted" not in rest, f"{log.name}: {rest}"

    def kill(self) -> None:
        """End what is left."""
        for process, _, _ in self._running:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            process.wait()
        self._running = []


@contextlib.contextmanager
def processes(url: str, folder: Path) -> Iterator[Processes]:
    """Processes that do not outlive the block."""
    found = Processes(url, folder)
    try:
        yield found
    finally:
        found.kill()
