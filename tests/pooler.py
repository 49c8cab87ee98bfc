"""Real PgBouncers in front of the test server, in transaction pooling."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psycopg
import pytest
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from tests.documents import ROOT
from tests.servers import free_ports
from tests.support import eventually, let_in, let_through

# The system's package, and the newer version that `.ci/pgbouncer` unpacks.
PROGRAM = shutil.which("pgbouncer", path="/usr/sbin:/usr/bin:/usr/local/bin:/usr/local/sbin")
UNPACKED = ROOT / "var" / "pgbouncer" / "pgbouncer"
NEW_PROGRAM = os.environ.get("OUTBOX_PGBOUNCER") or (str(UNPACKED) if UNPACKED.exists() else None)
# The file of the deployment kit.
KIT = ROOT / "deploy" / "pgbouncer.ini"
_PORT = 6432
_SETTINGS = """
[databases]
* = host={host} port={port} {as_user}

[pgbouncer]
listen_addr =
listen_port = {own_port}
unix_socket_dir = {folder}
auth_type = {authentication}
auth_file = {folder}/users
pool_mode = transaction
server_login_retry = 1
default_pool_size = {size}
max_client_conn = 1000
pidfile = {folder}/pgbouncer.pid
"""


@dataclass(frozen=True)
class Version:
    """A program, and how many prepared statements of a client it follows: None where it does not know the setting."""

    program: str | None
    prepared_statements: int | None = None

    @property
    def settings(self) -> str:
        """The lines that are added to the file of settings."""
        number = self.prepared_statements
        return "" if number is None else f"max_prepared_statements = {number}\n"


VERSIONS = {
    "old": Version(PROGRAM),
    "new": Version(NEW_PROGRAM, 200),
    "new without prepared statements": Version(NEW_PROGRAM, 0),
}
_MISSING = {
    "old": "PgBouncer is not installed (Debian's package pgbouncer)",
    "new": "there is no PgBouncer from 1.22 on (.ci/pgbouncer var/pgbouncer, or OUTBOX_PGBOUNCER)",
}
# For tests of every version. A run of CI leaves none out.
EVERY_VERSION = [
    pytest.param(
        version,
        id=name.replace(" ", "-"),
        marks=pytest.mark.skipif(
            version.program is None and "CI" not in os.environ, reason=_MISSING[name.split(maxsplit=1)[0]]
        ),
    )
    for name, version in VERSIONS.items()
]


class Pooler:
    """A PgBouncer whose pool has `size` connections for each database of the server of `url`.

    Every client is the user of `url`. With `logins`, each client is the login that it names, with a pool of its own.
    """

    def __init__(
        self, url: str, folder: Path, *, size: int, version: Version = VERSIONS["old"], logins: Collection[str] = ()
    ) -> None:
        assert version.program is not None, "this PgBouncer is missing"
        self._program = version.program
        self._folder = folder
        self._settings = folder / "pgbouncer.ini"
        given = conninfo_to_dict(url)
        self.user = Path(str(given["host"])).owner()
        let_in(url, self.user)
        # It refuses to run as root, so it runs as the server's user, who may enter the folder of its socket.
        let_through(folder)
        user = str(given.get("user", "postgres"))
        (folder / "users").write_text("".join(f'"{name}" ""\n' for name in (user, *logins)))
        settings = _SETTINGS.format(
            host=given["host"], port=given.get("port", 5432), as_user="" if logins else f"user={user}", folder=folder,
            authentication="trust" if logins else "any", own_port=_PORT, size=size,
        )  # fmt: skip
        self._settings.write_text(settings + version.settings)
        self.url = make_conninfo(url, host=str(folder), port=str(_PORT))
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it, and wait until it answers."""
        with (self._folder / "log").open("ab") as log:
            command = [self._program, "-u", self.user, str(self._settings)]
            self._process = subprocess.Popen(command, stdout=log, stderr=log)
        eventually(self._answers, what=self.log)

    def stop(self, signal_number: int = signal.SIGTERM) -> None:
        """End it; a killed one leaves its socket and its file, which would keep the next one from starting."""
        assert self._process is not None
        self._process.send_signal(signal_number)
        self._process.wait()
        for left in (self._folder / "pgbouncer.pid", self._folder / f".s.PGSQL.{_PORT}"):
            left.unlink(missing_ok=True)

    def log(self) -> str:
        """Its log."""
        return (self._folder / "log").read_text()

    def _answers(self) -> bool:
        try:
            psycopg.connect(self.url).close()
        except psycopg.OperationalError:
            return False
        return True


class KitPooler(Pooler):
    """A PgBouncer with deploy/pgbouncer.ini: only addresses, folder and names of the databases are those of the test.

    `databases`: the databases of the file, and those of the test. `user`: a login of the file `userlist.txt` in the
    folder, and `password` its password.
    """

    def __init__(
        self, url: str, folder: Path, *, databases: Mapping[str, str], user: str, password: str, version: Version
    ) -> None:
        super().__init__(url, folder, size=1, version=version)
        [self.port] = free_ports(1)
        given = conninfo_to_dict(url)
        changes = {
            "host=db1 port=5432": f"host={given['host']} port={given.get('port', 5432)}",
            f"listen_port = {_PORT}": f"listen_port = {self.port}",
            "/etc/pgbouncer/": f"{folder}/",
            **{f"dbname={name}\n": f"dbname={database}\n" for name, database in databases.items()},
        }
        if version.prepared_statements is not None:
            changes[";max_prepared_statements"] = "max_prepared_statements"
        text = KIT.read_text()
        for written, of_test in changes.items():
            assert written in text
            text = text.replace(written, of_test)
        self._settings.write_text(text)
        self.url = make_conninfo(
            host="127.0.0.1", port=self.port, dbname=next(iter(databases)), user=user, password=password
        )  # fmt: skip


@contextmanager
def login_with_password(url: str) -> Iterator[tuple[str, str]]:
    """A login with all rights, and its password, for which the server asks."""
    name, password = f"shop_{os.getpid()}", "of-the-test"
    with psycopg.connect(url, autocommit=True) as connection:
        [place] = connection.execute("SHOW hba_file").fetchone() or ("",)
        rules = Path(place)
        before = rules.read_text()
        connection.execute(
            sql.SQL("CREATE ROLE {} SUPERUSER LOGIN PASSWORD {}").format(sql.Identifier(name), sql.Literal(password))
        )
        try:
            rules.write_text(f'local all "{name}" scram-sha-256\n{before}')
            connection.execute("SELECT pg_reload_conf()")
            eventually(lambda: _needs_password(make_conninfo(url, user=name)))
            yield name, password
        finally:
            rules.write_text(before)
            connection.execute("SELECT pg_reload_conf()")
            connection.execute(sql.SQL("DROP ROLE {}").format(sql.Identifier(name)))


def _needs_password(url: str) -> bool:
    try:
        psycopg.connect(url).close()
    except psycopg.OperationalError as error:
        return "password" in str(error)
    return False


@contextmanager
def pooled(url: str, folder: Path, *, size: int) -> Iterator[str]:
    """The URL of the database `url` through a pool of `size` connections, in the system's version."""
    with running(url, folder, size=size) as pooler:
        yield pooler.url


@contextmanager
def running(
    url: str, folder: Path, *, size: int, version: Version = VERSIONS["old"], logins: Collection[str] = ()
) -> Iterator[Pooler]:
    """A PgBouncer that is ended after the block."""
    pooler = Pooler(url, folder, size=size, version=version, logins=logins)
    pooler.start()
    try:
        yield pooler
    finally:
        pooler.stop()
