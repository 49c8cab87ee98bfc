from typing import Any

from django.db import migrations

# As migration 0016 of outbox: MariaDB compares the texts of the table as PostgreSQL does. By default, it would take two
# tasks whose names differ in case only for one.
_CONVERT = "ALTER TABLE {} CONVERT TO CHARACTER SET utf8mb4 COLLATE utf8mb4_nopad_bin"


def prepare(apps: Any, schema_editor: Any) -> None:
    connection = schema_editor.connection
    if connection.vendor != 'mysql' or not connection.mysql_is_mariadb:
        return
    tables = set(connection.introspection.table_names())
    for model in apps.get_app_config('outbox_tasks').get_models():
        if model._meta.db_table in tables:
            schema_editor.execute(_CONVERT.format(schema_editor.quote_name(model._meta.db_table)), params=None)


class Migration(migrations.Migration):

    dependencies = [
        ('outbox_tasks', '0002_message_of_the_entry'),
    ]

    operations = [
        migrations.RunPython(prepare, migrations.RunPython.noop, atomic=False),
    ]
