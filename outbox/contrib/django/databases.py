"""Entries of DATABASES from libpq URLs."""

from __future__ import annotations

from typing import Any

import psycopg
from psycopg.conninfo import conninfo_to_dict

from outbox.errors import ConfigurationError


def database_from_url(url: str, **options: Any) -> dict[str, Any]:
    """A DATABASES entry for a PostgreSQL URL or libpq connection string; `options` are further keys of it.

    Raises ConfigurationError when it cannot be read.
    """
    try:
        info = conninfo_to_dict(url)
    except psycopg.Error as error:
        raise ConfigurationError(
            f"the database URL cannot be read ({error}): write postgresql://user:password@host:5432/database."
        ) from error
    names = {"dbname": "NAME", "user": "USER", "password": "PASSWORD", "host": "HOST", "port": "PORT"}
    entry: dict[str, Any] = {key: str(info.pop(name, "") or "") for name, key in names.items()}
    return {"ENGINE": "django.db.backends.postgresql", **entry, "OPTIONS": info, **options}
