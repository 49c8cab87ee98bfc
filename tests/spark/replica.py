"""A real streaming replica of the test server."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psycopg
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from tests.support import eventually, let_in, let_through


@contextmanager
def streaming(url: str, folder: Path) -> Iterator[str]:
    """The URL of a replica of the server at `url`, run by the same user."""
    owner = Path(str(conninfo_to_dict(url)["host"])).owner()
    data, user, standby = let_in(url, owner), owner, folder / "standby"
    # Root's group would shut it out of root's folders, although any other user may pass through them.
    as_server: dict[str, Any] = {"user": user, "cwd": folder}
    if os.geteuid() == 0:
        as_server |= {"group": data.group(), "extra_groups": []}
    programs = Path(shlex.split((data / "postmaster.opts").read_text())[0]).parent
    let_through(folder)
    copy = [programs / "pg_basebackup", "-D", standby, "-R", "-X", "stream", "-c", "fast", "-d", url]
    subprocess.run([str(part) for part in copy], check=True, **as_server)
    server = [programs / "postgres", "-D", standby, "-h", "", "-k", folder, "-p", "5432"]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen([str(part) for part in server], stdout=log, stderr=log, **as_server)
    replica = make_conninfo(url, host=str(folder), port="5432")
    try:
        eventually(lambda: _answers(replica), what="the replica")
        yield replica
    finally:
        # SIGINT ends the sessions. After SIGTERM the server would wait for their ends.
        process.send_signal(signal.SIGINT)
        process.wait()


def _answers(url: str) -> bool:
    try:
        psycopg.connect(url).close()
    except psycopg.OperationalError:
        return False
    return True
