"""Two versions of the package that run beside each other: the present one, and a next one that changes the tables.

The next version is a copy of the package with two changes of the tables and a changed SQL function:

    new = versions.make_next(tmp_path / "next")
    with versions.processes(url, tmp_path / "logs") as processes:
        processes.start(versions.ROOT, "produce", "consume")
        processes.run(new, "setup")
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from outbox.broker.schema import install
from tests.support import eventually

ROOT: Final = Path(__file__).resolve().parents[3]
SCHEMA: Final = Path(install.__file__).parent
NEXT: Final = install.SCHEMA_VERSION + 2
"""The schema version of the next version."""

# In the second change, a column that a changed function fills.
CHANGES: Final = {
    NEXT - 1: """-- Locks: op_log
ALTER TABLE op_log ADD COLUMN note text;
CREATE TABLE extra (name text PRIMARY KEY);
""",
    NEXT: """-- Locks: commit_log, subscription
ALTER TABLE commit_log ADD COLUMN stored_by text;
ALTER TABLE subscription ADD COLUMN note text NOT NULL DEFAULT '';
""",
}
# The same in the files of a new installation.
_EDITS: Final = {
    "current.sql": {
        "    body             bytea       NOT NULL\n);": "    body bytea NOT NULL,\n    stored_by text\n);",
        "'remote_apply'))\n);": "'remote_apply')),\n    note text\n);\nCREATE TABLE extra (name text PRIMARY KEY);",
        "    timed_out     bigint      NOT NULL DEFAULT 0,\n    PRIMARY": (
            "    timed_out bigint NOT NULL DEFAULT 0,\n    note text NOT NULL DEFAULT '',\n    PRIMARY"
        ),
    },
    "functions/append_one.sql": {
        "headers, body)\n    VALUES": "headers, body, stored_by)\n    VALUES",
        "headers, body)\n    ON CONFLICT": "headers, body, 'append_one')\n    ON CONFLICT",
    },
}


def make_next(target: Path) -> Path:
    """Copy the package to `target`, change its tables, and return `target`."""
    shutil.copytree(ROOT / "outbox", target / "outbox", ignore=shutil.ignore_patterns("__pycache__"))
    _change_schema(target / "outbox" / "broker" / "schema")
    return target


def become_next(folder: Path, patch: pytest.MonkeyPatch) -> None:
    """Let this process install the tables of the next version, whose files are written into `folder`."""
    shutil.copytree(SCHEMA, folder, ignore=shutil.ignore_patterns("__pycache__"))
    _change_schema(folder)
    patch.setattr(install, "_FOLDER", folder)
    patch.setattr(install, "_CHANGES", install._numbered(folder / "changes"))
    patch.setattr(install, "SCHEMA_VERSION", NEXT)


def _change_schema(folder: Path) -> None:
    (folder / "changes").mkdir(exist_ok=True)
    for number, text in CHANGES.items():
        (folder / "changes" / f"{number:04}_next.sql").write_text(text, encoding="utf-8")
    for name, edits in _EDITS.items():
        content = (folder / name).read_text(encoding="utf-8")
        for before, after in edits.items():
            assert content.count(before) == 1, f"{name} has not {before!r} once"
            content = content.replace(before, after)
        (folder / name).write_text(content, encoding="utf-8")


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

    def run(self, path: Path, *roles: str) -> None:
        """Run one process per role at the same time, each to its end."""
        self.start(path, *roles)
        ending, self._running = self._running[-len(roles) :], self._running[: -len(roles)]
        for process, log, _ in ending:
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
