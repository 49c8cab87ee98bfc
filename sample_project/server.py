"""The PostgreSQL server of the sample: an embedded one under var/, or the one $OUTBOX_POSTGRES_URL names."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

import psycopg
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict

from outbox.broker import embedded

DIRECTORY_VARIABLE: Final = "OUTBOX_DEMO_DIR"
PREFIX_VARIABLE: Final = "SAMPLE_DATABASE_PREFIX"
_PREFIX: Final = os.environ.get(PREFIX_VARIABLE, "outbox_sample")
ORDERS: Final = f"{_PREFIX}_orders"
BROKER: Final = f"{_PREFIX}_broker"
CELERY: Final = f"{_PREFIX}_celery"
_URL_VARIABLE: Final = "SAMPLE_SERVER_URL"
SETTINGS: Final = {"max_connections": "200", "max_wal_size": "1GB"}


def directory() -> Path:
    """Where the sample keeps its database, logs and other files."""
    named = os.environ.get(DIRECTORY_VARIABLE)
    return Path(named).resolve() if named else Path(__file__).resolve().parent.parent / "var"


def start() -> str:
    """Start the server, or join it where it runs, and return its URL; child processes find it too.

    The embedded one runs until `stop`. Settings do not call this, so that importing them starts nothing.
    """
    os.environ[_URL_VARIABLE] = embedded.server_url(directory() / "postgres", settings=SETTINGS)
    return url()


def url() -> str:
    """The URL of the server that was started, else libpq's defaults."""
    return os.environ.get(_URL_VARIABLE, "postgresql://")


def create_databases() -> None:
    """Create the databases of the sample that do not exist yet."""
    for name in (ORDERS, BROKER, CELERY):
        embedded.create_database(url(), name)


def drop_databases() -> None:
    """Drop the databases of the sample, whoever is connected to them."""
    with psycopg.connect(url(), autocommit=True) as connection:
        for name in (ORDERS, BROKER, CELERY):
            connection.execute(sql.SQL("DROP DATABASE IF EXISTS {} WITH (FORCE)").format(sql.Identifier(name)))


def stop() -> None:
    """Stop the embedded server; a server of one's own is left alone."""
    if embedded.URL_VARIABLE not in os.environ:
        embedded.stop(directory() / "postgres")


def celery_url(server_url: str) -> str:
    """The URL of Celery's own database, for the SQLAlchemy transport."""
    from sqlalchemy.engine import URL

    parts = {key: str(value) for key, value in conninfo_to_dict(server_url).items() if value is not None}
    parts.pop("dbname", None)
    transport = URL.create(
        "postgresql+psycopg",
        username=parts.pop("user", None),
        password=parts.pop("password", None),
        port=int(parts.pop("port")) if "port" in parts else None,
        database=CELERY,
        query=parts,
    )
    return f"sqla+{transport.render_as_string(hide_password=False)}"
