"""Makes entries of DATABASES from URLs, for settings files."""

from __future__ import annotations

from typing import Any

from outbox.broker.database.connection import read_conninfo


def database_from_url(url: str, **options: Any) -> dict[str, Any]:
    """A DATABASES entry for a PostgreSQL URL or libpq connection string; `options` adds further keys.

    Raises ConfigurationError if the URL cannot be parsed.
    """
    info = read_conninfo(url, "the database URL")
    names = {"dbname": "NAME", "user": "USER", "password": "PASSWORD", "host": "HOST", "port": "PORT"}
    entry: dict[str, Any] = {key: str(info.pop(name, "") or "") for name, key in names.items()}
    return {"ENGINE": "django.db.backends.postgresql", **entry, "OPTIONS": info, **options}
