from typing import Any

import django.db.models.functions.datetime
from django.db import migrations, models, router

# The relay updates and deletes every row. Free space in each page keeps the update on this page, so it changes no
# index. A vacuum after each 1,000 dead rows keeps the index short in which the relay finds the first row of each line.
_SET = (
    "ALTER TABLE outbox_relay SET (fillfactor = 70, autovacuum_vacuum_scale_factor = 0, "
    "autovacuum_vacuum_threshold = 1000)"
)


def vacuum_often(apps: Any, schema_editor: Any) -> None:
    connection = schema_editor.connection
    entries = apps.get_model("outbox", "RelayEntry")
    if connection.vendor == "postgresql" and router.allow_migrate_model(connection.alias, entries):
        with connection.cursor() as cursor:
            cursor.execute(_SET)


class Migration(migrations.Migration):

    dependencies = [
        ('outbox', '0014_saved_reconciliation'),
    ]

    operations = [
        migrations.CreateModel(
            name='RelayEntry',
            fields=[
                ('sequence', models.BigAutoField(primary_key=True, serialize=False)),
                ('line', models.BigIntegerField()),
                ('message_id', models.UUIDField(db_index=True)),
                ('transaction_id', models.UUIDField()),
                ('topic', models.CharField(max_length=127)),
                ('key', models.CharField(max_length=255)),
                ('tag', models.CharField(max_length=127)),
                ('headers', models.JSONField()),
                ('content_type', models.TextField()),
                ('body', models.BinaryField()),
                ('size', models.IntegerField()),
                ('born_at', models.DateTimeField()),
                ('deliver_at', models.DateTimeField(null=True)),
                ('due_at', models.DateTimeField(db_default=django.db.models.functions.datetime.Now())),
                ('taken_at', models.DateTimeField(null=True)),
                ('attempts', models.IntegerField(default=0)),
                ('error', models.TextField(default='')),
                ('parked_at', models.DateTimeField(null=True)),
            ],
            options={
                'verbose_name': 'message for the relay',
                'verbose_name_plural': 'messages for the relay',
                'db_table': 'outbox_relay',
                'indexes': [models.Index(fields=['line', 'sequence'], name='outbox_relay_line')],
            },
        ),
        migrations.CreateModel(
            name='RelayLease',
            fields=[
                ('singleton', models.BooleanField(default=True, primary_key=True, serialize=False)),
                ('holder', models.UUIDField()),
                ('expires_at', models.DateTimeField()),
            ],
            options={
                'verbose_name': 'lease of the relay',
                'db_table': 'outbox_relay_lease',
                'constraints': [models.CheckConstraint(condition=models.Q(('singleton', True)), name='outbox_one_relay')],
            },
        ),
        migrations.RunPython(vacuum_often, migrations.RunPython.noop),
    ]
