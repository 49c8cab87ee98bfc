"""Dumping, copying and restoring databases and servers, as an operator does it with PostgreSQL's own programs."""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psycopg
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from outbox.broker import embedded
from outbox.broker.private_server import PrivateServer
from tests.support import eventually


def _server(data: Path) -> PrivateServer:
    return embedded._server(data)


def _program(name: str) -> str:
    return str(_server(Path()).binaries / name)


def dump(url: str, file: Path) -> Path:
    """A dump of a whole database."""
    subprocess.run([_program("pg_dump"), "-Fc", "-d", url, "-f", str(file)], check=True)
    return file


def restore(url: str, file: Path, *options: str) -> None:
    """Load a dump into a database."""
    subprocess.run([_program("pg_restore"), *options, "-d", url, str(file)], check=True, env=_never_the_victim())


def _never_the_victim() -> dict[str, str]:
    """Variables for a program that locks tables which a worker uses. Of a deadlock, PostgreSQL ends the session that
    notices it, and that is then the worker's."""
    return {**os.environ, "PGOPTIONS": "-c deadlock_timeout=1h"}


def restore_over(url: str, file: Path) -> None:
    """Replace the tables of a database in use: sessions stay open."""
    restore(url, file, "--clean", "--if-exists", "--single-transaction")


def reload_rows(url: str, file: Path) -> None:
    """Empty all tables of a database in use and load the rows again, at once: tables and sessions stay."""
    rows = file.with_suffix(".sql")
    options = ["--data-only", "--disable-triggers", "-f", str(rows)]
    subprocess.run([_program("pg_restore"), *options, str(file)], check=True)
    with psycopg.connect(url, autocommit=True) as connection:
        [names] = connection.execute(
            "SELECT string_agg(format('%I.%I', schemaname, tablename), ', ') FROM pg_tables"
            " WHERE schemaname NOT IN ('pg_catalog', 'information_schema')"
        ).fetchone() or ("",)
    rows.write_text(f"TRUNCATE {names};\n{rows.read_text()}")
    subprocess.run(
        [_program("psql"), "-q", "-1", "-v", "ON_ERROR_STOP=1", "-d", url, "-f", str(rows)],
        check=True,
        stdout=subprocess.DEVNULL,
        env=_never_the_victim(),
    )


def recreate(url: str, file: Path) -> None:
    """Drop the database, make one of the same name, and load the dump: sessions end.

    The dump is loaded in one transaction. Otherwise a worker that has connected again writes rows into tables that the
    load has created but not filled.
    """
    name = str(conninfo_to_dict(url)["dbname"])
    with psycopg.connect(make_conninfo(url, dbname="postgres"), autocommit=True) as connection:
        connection.execute(sql.SQL("DROP DATABASE IF EXISTS {} WITH (FORCE)").format(sql.Identifier(name)))
        connection.execute(sql.SQL("CREATE DATABASE {} TEMPLATE template0").format(sql.Identifier(name)))
    restore(url, file, "--single-transaction")


def base_backup(url: str, target: Path) -> Path:
    """A physical copy of the whole server in a new data directory."""
    subprocess.run([_program("pg_basebackup"), "-D", str(target), "-X", "stream", "-c", "fast", "-d", url], check=True)
    # The socket of the copied server is in its data directory.
    for lock in target.glob(".s.PGSQL.*"):
        lock.unlink()
    _own(target)
    return target


def _own(data: Path) -> None:
    account: pwd.struct_passwd = _server(data).account
    if account.pw_uid != os.geteuid():
        for path in (data, *data.rglob("*")):
            os.chown(path, account.pw_uid, account.pw_gid)
    data.chmod(0o700)


class Servers:
    """Servers of a test behind addresses that lead to another server when one takes over."""

    def __init__(self, folder: Path, settings: dict[str, str]) -> None:
        self._folder = folder
        self._settings = settings
        self._data: dict[str, Path] = {}

    def start(self, name: str) -> str:
        """A new server behind the address `name`; its URL."""
        data = self._folder / f"{name}-data"
        embedded.start(data, settings=self._settings)
        self._lead(name, data)
        return self.url(name)

    def url(self, name: str) -> str:
        """The address, whichever server is behind it."""
        return make_conninfo("", user="postgres", dbname="postgres", host=str(self._folder / name))

    def put_back(self, name: str, copy: Path) -> None:
        """Put a physical copy in the place of the server's data directory, as a restored disk is."""
        data = self._data[name]
        embedded.stop(data)
        shutil.rmtree(data)
        copy.rename(data)
        embedded.start(data, settings=self._settings)
        self._lead(name, data)

    def replace(self, name: str, copy: Path | None = None, *, load: Callable[[str], None] = lambda url: None) -> None:
        """Another server takes over the address: a physical copy, or an empty one once `load` has filled it."""
        old, new = self._data[name], self._folder / f"{name}-new"
        if copy is not None:
            copy.rename(new)
        load(embedded.start(new, settings=self._settings))
        embedded.stop(old)
        self._lead(name, new)

    def stop(self) -> None:
        """End all of them."""
        for data in self._data.values():
            embedded.stop(data)

    def _lead(self, name: str, data: Path) -> None:
        lines = (data / "postmaster.pid").read_text(encoding="utf-8").splitlines()
        link, new = self._folder / name, self._folder / f"{name}.link"
        new.symlink_to(lines[4])
        new.rename(link)
        self._data[name] = data
        eventually(lambda: _answers(self.url(name)), what="the server", within_seconds=60)


def _answers(url: str) -> Any:
    try:
        psycopg.connect(url, connect_timeout=5).close()
    except psycopg.OperationalError:
        return False
    return True
