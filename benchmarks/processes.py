"""CPU time of processes, from /proc: one by one, and a server's sessions by their name."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psycopg

_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Process:
    """One process: seconds of CPU that it used, and those of its children that have ended and were waited for."""

    pid: int
    parent: int
    seconds: float
    of_ended_children: float
    arguments: tuple[str, ...]


def read(pid: int) -> Process | None:
    """None when it is gone."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
        arguments = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The name is in parentheses and may contain any character.
    fields = stat[stat.rindex(")") + 2 :].split()
    own, children = ((int(fields[n]) + int(fields[n + 1])) / _TICKS_PER_SECOND for n in (11, 13))
    return Process(pid, int(fields[1]), own, children, tuple(arguments))


def tree(root: int) -> Iterator[Process]:
    """`root` and what descends from it."""
    everything = [found for pid in Path("/proc").iterdir() if pid.name.isdigit() if (found := read(int(pid.name)))]
    wanted = {root}
    while True:
        more = {process.pid for process in everything if process.parent in wanted} - wanted
        if not more:
            break
        wanted |= more
    return (process for process in everything if process.pid in wanted)


def postmaster(connection: psycopg.Connection) -> int:
    """The server's first process, which must be on this machine."""
    backend = read(connection.info.backend_pid)
    if backend is None:
        raise SystemExit("the server is not on this machine: its CPU time cannot be read")
    return backend.parent


def sessions(connection: psycopg.Connection) -> dict[int, str]:
    """The server's processes that serve clients, with the names the clients gave."""
    rows = connection.execute(
        "SELECT pid, application_name FROM pg_stat_activity WHERE backend_type = 'client backend'"
    )
    return {int(pid): str(name) for pid, name in rows}
