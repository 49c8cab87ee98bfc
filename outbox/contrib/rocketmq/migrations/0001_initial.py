from typing import Any

import django.db.models.functions.datetime
from django.db import migrations, models, router

from outbox.contrib.django.database.columns import compare_as_postgresql

# The relay updates and deletes every row. Free space in each page keeps the update on this page, so it changes no
# index. A vacuum after each 1,000 dead rows keeps the index short in which the relay finds the first row of each line.
_RELAY = (
    "ALTER TABLE outbox_relay SET (fillfactor = 70, autovacuum_vacuum_scale_factor = 0, "
    "autovacuum_vacuum_threshold = 1000)"
)


def prepare_postgresql(apps: Any, schema_editor: Any) -> None:
    """Set how autovacuum and pages of the relay's table work."""
    alias = schema_editor.connection.alias
    is_here = router.allow_migrate_model(alias, apps.get_model("outbox_rocketmq", "RelayEntry"))
    if is_here and schema_editor.connection.vendor == "postgresql":
        schema_editor.execute(_RELAY, params=None)


class Migration(migrations.Migration):

    initial = True

    dependencies = [
    ]

    operations = [
        migrations.CreateModel(
            name="DeadLetterNote",
            fields=[
                ("id", models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name="ID")),
                ("group", models.CharField(db_column="consumer_group", max_length=127)),
                ("message_id", models.UUIDField()),
                ("attempts", models.IntegerField(default=0)),
                ("error", models.TextField(default="")),
                ("noted_at", models.DateTimeField()),
                ("settled_until", models.BigIntegerField(default=0)),
                ("settled_at", models.DateTimeField(null=True)),
                ("is_discarded", models.BooleanField(default=False)),
            ],
            options={
                "verbose_name": "note about a dead letter of RocketMQ",
                "verbose_name_plural": "notes about dead letters of RocketMQ",
                "db_table": "outbox_dead_letter_note",
                "constraints": [
                    models.UniqueConstraint(fields=("group", "message_id"), name="outbox_one_dead_letter_note")
                ],
            },
        ),
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
        # MariaDB ends a transaction at each of these statements, and Django refuses them in one.
        migrations.RunPython(compare_as_postgresql('outbox_rocketmq'), migrations.RunPython.noop, atomic=False),
        migrations.RunPython(prepare_postgresql, migrations.RunPython.noop),
    ]
