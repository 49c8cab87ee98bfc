"""Values as the columns of an application's database store them."""

from __future__ import annotations

from typing import Any, Final
from uuid import UUID

from django.db.backends.base.base import BaseDatabaseWrapper

SQLITE_NOW: Final = "strftime('%%Y-%%m-%%d %%H:%%M:%%f', 'now')"
"""The present time by SQLite's clock, in the form that Django gives a time column; for statements with parameters."""


def stored_uuid(connection: BaseDatabaseWrapper, value: UUID) -> Any:
    """Return the value of a UUID column: a UUID, or 32 hexadecimal digits if the database has no such type."""
    return value if connection.features.has_native_uuid_field else value.hex


def read_uuid(value: Any) -> UUID:
    """Return the UUID of a value that was read from such a column."""
    return value if isinstance(value, UUID) else UUID(value)
