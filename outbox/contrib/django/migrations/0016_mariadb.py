from typing import Any

from django.db import migrations, router

# On MariaDB, texts are compared without regard to case and accents by default. Then the groups 'mail' and 'Mail' would
# have the same inbox row, and one of the two handlers would not be called. With this collation, MariaDB compares texts
# as PostgreSQL does. If a later migration adds a text column, it must have this collation, too.
_CONVERT = "ALTER TABLE {} CONVERT TO CHARACTER SET utf8mb4 COLLATE utf8mb4_nopad_bin"

# As on SQLite (migration 0003), a DELETE of rows that check-back may still ask about gives the ledger a new id.
_GUARD = """
CREATE OR REPLACE TRIGGER outbox_ledger_deleted AFTER DELETE ON outbox_ledger FOR EACH ROW
IF NOT EXISTS (SELECT 1 FROM outbox_ledger_identity WHERE pruned_before > OLD.transaction_id) THEN
    UPDATE outbox_ledger_identity SET ledger_id = REPLACE(UUID(), '-', '');
END IF
"""
_REMOVE = "DROP TRIGGER IF EXISTS outbox_ledger_deleted"


def prepare(apps: Any, schema_editor: Any) -> None:
    connection = schema_editor.connection
    if not _is_mariadb(connection):
        return
    tables = set(connection.introspection.table_names())
    for model in apps.get_app_config('outbox').get_models():
        if model._meta.db_table in tables:
            schema_editor.execute(_CONVERT.format(schema_editor.quote_name(model._meta.db_table)), params=None)
    if router.allow_migrate_model(connection.alias, apps.get_model('outbox', 'LedgerEntry')):
        schema_editor.execute(_GUARD, params=None)


def leave_unguarded(apps: Any, schema_editor: Any) -> None:
    if _is_mariadb(schema_editor.connection):
        schema_editor.execute(_REMOVE, params=None)


def _is_mariadb(connection: Any) -> bool:
    return connection.vendor == 'mysql' and connection.mysql_is_mariadb


class Migration(migrations.Migration):

    dependencies = [
        ('outbox', '0015_relay'),
    ]

    operations = [
        migrations.RunPython(prepare, leave_unguarded, atomic=False),
    ]
