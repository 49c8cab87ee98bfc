"""Helpers that tests share."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import psycopg

from outbox.utils import faults

Value = TypeVar("Value")


def eventually(
    condition: Callable[[], Value], *, within_seconds: float = 20.0, what: str | Callable[[], str] = ""
) -> Value:
    """The first truthy value of `condition`, polled; AssertionError with its last value when time is up.

    A condition that takes long is polled less often, so that it does not slow down what it waits for.
    """
    pause = threading.Event()
    deadline = time.monotonic() + within_seconds
    while True:
        began = time.monotonic()
        value = condition()
        if value:
            return value
        now = time.monotonic()
        if now > deadline:
            text = what() if callable(what) else what
            raise AssertionError(f"not within {within_seconds} s: {text or condition}; last value: {value!r}")
        pause.wait(min(max(0.02, 2 * (now - began)), 0.1))


def killed(work: Callable[[], object], fault: str) -> bool:
    """Whether a forked child that does this work was killed by a fault (`point=kill@visit`)."""
    child = os.fork()
    if child == 0:
        try:
            faults.arm(fault)
            work()
        finally:
            os._exit(1)
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status) == -signal.SIGKILL


def let_in(url: str, user: str) -> Path:
    """Let another user of this machine connect to the server, which knows its own alone; returns its data directory."""
    with psycopg.connect(url, autocommit=True) as connection:
        (folder,) = connection.execute("SHOW data_directory").fetchone() or ("",)
        data = Path(folder)
        mapping = data / "pg_ident.conf"
        line = f'outbox "{user}" all\n'
        if line not in mapping.read_text():
            with mapping.open("a") as file:
                file.write(line)
        (before,) = connection.execute("SELECT pg_conf_load_time()").fetchone() or (None,)
        connection.execute("SELECT pg_reload_conf()")
    eventually(lambda: _loaded_after(url, before), what="the server's new settings")
    return data


def let_through(folder: Path) -> None:
    """Let every user of this machine into a test's folder: it, and two or three above it, were made for us alone."""
    folder.chmod(0o777)
    for parent in folder.parents:
        if not parent.name.startswith(("pytest-", "popen-", "outbox-")):
            break
        parent.chmod(parent.stat().st_mode | 0o011)


def _loaded_after(url: str, before: object) -> bool:
    with psycopg.connect(url, autocommit=True) as connection:
        row = connection.execute("SELECT pg_conf_load_time() > %s", [before]).fetchone()
    return row is not None and bool(row[0])
