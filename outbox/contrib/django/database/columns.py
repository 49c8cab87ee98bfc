"""Values as the columns of an application's database store them."""

from __future__ import annotations

from collections.abc import Callable
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


# On MariaDB, texts are compared without regard to case and accents by default. Then the groups 'mail' and 'Mail' would
# have the same inbox row, and one of the two handlers would not be called. With this collation, MariaDB compares texts
# as PostgreSQL does. If a later migration adds a text column, it must have this collation, too.
_CONVERT: Final = "ALTER TABLE {} CONVERT TO CHARACTER SET utf8mb4 COLLATE utf8mb4_nopad_bin"


def compare_as_postgresql(app_label: str) -> Callable[[Any, Any], None]:
    """Return the function of a `RunPython` after which MariaDB compares the texts of an app's tables as PostgreSQL.

    MariaDB ends a transaction at each of its statements, so the operation needs `atomic=False`.
    """

    def convert(apps: Any, schema_editor: Any) -> None:
        connection = schema_editor.connection
        if connection.vendor == "mysql" and connection.mysql_is_mariadb:
            tables = set(connection.introspection.table_names())
            for model in apps.get_app_config(app_label).get_models():
                if model._meta.db_table in tables:
                    schema_editor.execute(_CONVERT.format(schema_editor.quote_name(model._meta.db_table)), params=None)

    return convert
