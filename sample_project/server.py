"""The PostgreSQL server of the sample: an embedded one under var/, or the one $OUTBOX_POSTGRES_URL names."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final
from urllib.parse import quote

import psycopg
from kombu.connection import Connection
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict

from outbox.broker import embedded

DIRECTORY_VARIABLE: Final = "OUTBOX_DEMO_DIR"
PREFIX_VARIABLE: Final = "SAMPLE_DATABASE_PREFIX"
APPLICATION_VARIABLE: Final = "APPLICATION_URL"
BROKER_VARIABLE: Final = "OUTBOX_BROKER_URL"
_PREFIX: Final = os.environ.get(PREFIX_VARIABLE, "outbox_sample")
ORDERS: Final = f"{_PREFIX}_orders"
BROKER: Final = f"{_PREFIX}_broker"
CELERY: Final = f"{_PREFIX}_celery"
CELERY_QUEUES: Final = ("celery", "outbox")
_URL_VARIABLE: Final = "SAMPLE_SERVER_URL"
SETTINGS: Final = {"max_connections": "200", "max_wal_size": "1GB"}


def directory() -> Path:
    """The folder of the sample's database, logs and other files."""
    named = os.environ.get(DIRECTORY_VARIABLE)
    return Path(named).resolve() if named else Path(__file__).resolve().parent.parent / "var"


def is_needed() -> bool:
    """Whether the sample uses databases of its own, and not those that $APPLICATION_URL and $OUTBOX_BROKER_URL name."""
    return APPLICATION_VARIABLE not in os.environ


def start() -> str:
    """Start the server, or join the running one, and return its URL; child processes find it too.

    The embedded one runs until `stop`. Settings do not call this, so that importing them starts nothing. Does nothing
    if no server is needed.
    """
    if not is_needed():
        return url()
    os.environ[_URL_VARIABLE] = embedded.server_url(directory() / "postgres", settings=SETTINGS)
    return url()


def url() -> str:
    """The URL of the server that was started, else libpq's defaults."""
    return os.environ.get(_URL_VARIABLE, "postgresql://")


def create_databases() -> None:
    """Create the databases of the sample that do not exist yet; none if no server is needed."""
    if not is_needed():
        return
    try:
        for name in (ORDERS, BROKER, CELERY):
            embedded.create_database(url(), name)
    except psycopg.errors.InsufficientPrivilege as error:
        raise SystemExit(
            f"{embedded.URL_VARIABLE}: {str(error).strip()}. Let this login create databases, or name databases of "
            f"your own in {APPLICATION_VARIABLE} and {BROKER_VARIABLE} (sample_project/README.md)."
        ) from None


def create_queues() -> None:
    """Create Celery's queues before its first start.

    If a worker and a beat both find a queue missing, kombu's SQLAlchemy transport ends one of them. Call this in a
    process that ends soon, because kombu leaves a transaction open.
    """
    with Connection(celery_url(url())) as connection:  # type: ignore[no-untyped-call]
        for name in CELERY_QUEUES:
            connection.SimpleQueue(name).close()


def drop_databases() -> None:
    """Drop the databases of the sample, even with open connections."""
    with psycopg.connect(url(), autocommit=True) as connection:
        for name in (ORDERS, BROKER, CELERY):
            connection.execute(sql.SQL("DROP DATABASE IF EXISTS {} WITH (FORCE)").format(sql.Identifier(name)))


def stop() -> None:
    """Stop the embedded server; a server from $OUTBOX_POSTGRES_URL keeps running."""
    if embedded.URL_VARIABLE not in os.environ:
        embedded.stop(directory() / "postgres")


def celery_url(server_url: str) -> str:
    """The URL of Celery's own database, for kombu's SQLAlchemy transport."""
    parts = {name: quote(str(value), safe="") for name, value in conninfo_to_dict(server_url).items() if value}
    parts.pop("dbname", None)
    login = ":".join(parts.pop(name) for name in ("user", "password") if name in parts)
    port = f":{parts.pop('port')}" if "port" in parts else ""
    # A socket's directory is not valid as a URL's host name, so the host goes with the other parameters.
    query = "&".join(f"{name}={value}" for name, value in parts.items())
    return f"sqla+postgresql+psycopg://{login}{'@' if login else ''}{port}/{CELERY}?{query}"
