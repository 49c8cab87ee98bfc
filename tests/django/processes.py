"""Starting the processes of a project for a test, and ending exactly those."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outbox.contrib.django.database.aliases import alias_conninfo

ROOT = Path(__file__).resolve().parent.parent.parent


def environment(
    *,
    outbox: Mapping[str, Any] | None = None,
    default: Mapping[str, Any] | None = None,
    faults: str = "",
    subscribers: str = "effects.usual",
) -> dict[str, str]:
    """The environment of a process that works on the databases of this test; `default` changes that alias."""
    return {
        **{name: value for name, value in os.environ.items() if name != "OUTBOX_FAULTS"},
        "DJANGO_SETTINGS_MODULE": "tests.django.worker_settings",
        "TEST_DEFAULT_URL": alias_conninfo("default"),
        "TEST_BROKER_URL": alias_conninfo("broker"),
        "TEST_DEFAULT": json.dumps(dict(default or {})),
        "TEST_OUTBOX": json.dumps(dict(outbox or {})),
        "TEST_SUBSCRIBERS": f"tests.django.{subscribers}",
        "PYTHONUNBUFFERED": "1",
        **({"OUTBOX_FAULTS": faults} if faults else {}),
    }


@contextmanager
def process(
    arguments: Sequence[str],
    *,
    outbox: Mapping[str, Any] | None = None,
    default: Mapping[str, Any] | None = None,
    faults: str = "",
    quiet: bool = False,
    log: Path | None = None,
    variables: Mapping[str, str] | None = None,
    subscribers: str = "effects.usual",
) -> Iterator[subprocess.Popen[str]]:
    """A Python process of the project, terminated (and if need be killed) at the end of the block.

    `quiet` throws its log away: one that is read at the end only must fit into a pipe. `log` is a file to which it is
    appended instead. `variables` go on top. `subscribers`: the module of tests.django with the subscribers.
    """
    with (
        contextlib.nullcontext() if log is None else log.open("a", encoding="utf-8") as file,
        subprocess.Popen(
            [sys.executable, *arguments],
            env={
                **environment(outbox=outbox, default=default, faults=faults, subscribers=subscribers),
                **(variables or {}),
            },
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=file or (subprocess.DEVNULL if quiet else subprocess.PIPE),
            text=True,
        ) as started,
    ):
        try:
            yield started
        finally:
            started.send_signal(signal.SIGTERM)
            try:
                started.communicate(timeout=15)
            except subprocess.TimeoutExpired:
                started.kill()
                started.communicate()


def child(role: str, **options: Any) -> Any:
    """A broker or consumer process."""
    return process(["-m", "outbox.contrib.django.worker.child", role], **options)


@dataclass(frozen=True)
class Forking:
    """Starts processes of a role one after the other, by fork (tests.django.forked_children)."""

    process: subprocess.Popen[str]

    def start(self, faults: str) -> int:
        """The pid of a new process with these fault points."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{faults}\n")
        self.process.stdin.flush()
        return self._read()

    def wait(self) -> int:
        """The exit code of the process that was started last, or minus the number of its signal."""
        return self._read()

    def _read(self) -> int:
        assert self.process.stdout is not None
        return int(self.process.stdout.readline())


@contextmanager
def forking(role: str, **options: Any) -> Iterator[Forking]:
    """Processes of a role, with the options of `process`."""
    with process(["-m", "tests.django.forked_children", role], quiet=True, **options) as started:
        yield Forking(started)
