"""The PostgreSQL server of the sample: an embedded one under var/, or the one $OUTBOX_POSTGRES_URL names."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from psycopg.conninfo import conninfo_to_dict

from outbox.broker import embedded

DIRECTORY_VARIABLE: Final = "OUTBOX_DEMO_DIR"
ORDERS: Final = "outbox_sample_orders"
BROKER: Final = "outbox_sample_broker"
CELERY: Final = "outbox_sample_celery"
SETTINGS: Final = {"max_connections": "200", "max_wal_size": "1GB"}


def directory() -> Path:
    """Where the sample keeps its database, logs and other files."""
    named = os.environ.get(DIRECTORY_VARIABLE)
    return Path(named).resolve() if named else Path(__file__).resolve().parent.parent / "var"


def url() -> str:
    """The URL of the running server; starts the embedded one if need be. It runs until `stop`."""
    return embedded.server_url(directory() / "postgres", settings=SETTINGS)


def create_databases() -> None:
    """Create the databases of the sample that do not exist yet."""
    for name in (ORDERS, BROKER, CELERY):
        embedded.create_database(url(), name)


def stop() -> None:
    """Stop the embedded server; a server of one's own is left alone."""
    if embedded.URL_VARIABLE not in os.environ:
        embedded.stop(directory() / "postgres")


def django_database(server_url: str, name: str) -> dict[str, object]:
    """An entry of Django's DATABASES for one database of the server."""
    parts = conninfo_to_dict(server_url)
    return {
        "ENGINE": "django.db.backends.postgresql",
        "NAME": name,
        "USER": parts.get("user", ""),
        "PASSWORD": parts.get("password", ""),
        "HOST": parts.get("host", ""),
        "PORT": str(parts.get("port", "")),
        "CONN_MAX_AGE": 60,
        "CONN_HEALTH_CHECKS": True,
    }


def celery_url(server_url: str) -> str:
    """The URL of Celery's own database, for the SQLAlchemy transport."""
    from sqlalchemy.engine import URL

    parts = conninfo_to_dict(server_url)
    query = {key: str(value) for key, value in parts.items() if key not in ("user", "password", "port", "dbname")}
    url = URL.create(
        "postgresql+psycopg",
        username=parts.get("user"),
        password=parts.get("password"),
        port=int(parts["port"]) if "port" in parts else None,
        database=CELERY,
        query=query,
    )
    return f"sqla+{url.render_as_string(hide_password=False)}"
