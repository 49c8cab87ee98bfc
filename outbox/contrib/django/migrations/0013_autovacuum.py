from typing import Any

from django.db import migrations, router

# By default, autovacuum waits until a fifth of a table is dead. Pruning deletes a fourteenth of the inbox each day, so
# three days of deleted rows would wait for vacuum, and their space would not be used again before. An inbox with
# partitions has no such setting: a storage parameter belongs to each partition (ledger/partitions.py). See
# decision 282.
_SET = "ALTER TABLE outbox_inbox SET (autovacuum_vacuum_scale_factor = 0.05)"
_RESET = "ALTER TABLE outbox_inbox RESET (autovacuum_vacuum_scale_factor)"
_IS_PLAIN = "SELECT relkind = 'r' FROM pg_class WHERE oid = to_regclass('outbox_inbox')"


def begin_earlier(apps: Any, schema_editor: Any) -> None:
    _execute(apps, schema_editor, _SET)


def begin_by_default(apps: Any, schema_editor: Any) -> None:
    _execute(apps, schema_editor, _RESET)


def _execute(apps: Any, schema_editor: Any, statement: str) -> None:
    connection = schema_editor.connection
    inbox = apps.get_model("outbox", "InboxEntry")
    if connection.vendor != "postgresql" or not router.allow_migrate_model(connection.alias, inbox):
        return
    with connection.cursor() as cursor:
        cursor.execute(_IS_PLAIN)
        [is_plain] = cursor.fetchone()
        if is_plain:
            cursor.execute(statement)


class Migration(migrations.Migration):

    dependencies = [
        ('outbox', '0012_erasure_entry'),
    ]

    operations = [
        migrations.RunPython(begin_earlier, begin_by_default),
    ]
