"""A real PgBouncer in front of the test server, in transaction pooling."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from tests.support import eventually, let_in, let_through

PROGRAM = shutil.which("pgbouncer", path="/usr/sbin:/usr/bin:/usr/local/bin:/usr/local/sbin")
_SETTINGS = """
[databases]
* = host={host} port={port} user={user}

[pgbouncer]
listen_addr =
listen_port = {own_port}
unix_socket_dir = {folder}
auth_type = any
pool_mode = transaction
server_login_retry = 1
default_pool_size = {size}
user = {run_as}
pidfile = {folder}/pgbouncer.pid
"""


@contextmanager
def pooled(url: str, folder: Path, *, size: int) -> Iterator[str]:
    """The URL of the database `url` through a pool of `size` connections."""
    assert PROGRAM is not None
    given = conninfo_to_dict(url)
    run_as = Path(str(given["host"])).owner()
    let_in(url, run_as)
    # It refuses to run as root, so it runs as the server does: whoever may enter the folder of the server's socket.
    let_through(folder)
    settings = folder / "pgbouncer.ini"
    settings.write_text(
        _SETTINGS.format(
            host=given["host"], port=given.get("port", 5432), user=given.get("user", "postgres"), folder=folder,
            own_port=6432, size=size, run_as=run_as,
        )
    )  # fmt: skip
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen([PROGRAM, str(settings)], stdout=log, stderr=log)
    through = make_conninfo(url, host=str(folder), port="6432")
    try:
        eventually(lambda: _answers(through), what="the pool")
        yield through
    finally:
        process.terminate()
        process.wait()


def _answers(url: str) -> bool:
    try:
        psycopg.connect(url).close()
    except psycopg.OperationalError:
        return False
    return True
