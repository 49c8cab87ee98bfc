import uuid
from typing import Any

import django.db.models.functions.datetime
from django.db import migrations, models, router


def name_this_ledger(apps: Any, schema_editor: Any) -> None:
    """Give this database's ledger its id, unless the database has no ledger (a dedicated broker database)."""
    identity = apps.get_model("outbox", "LedgerIdentity")
    alias = schema_editor.connection.alias
    if router.allow_migrate_model(alias, identity):
        identity.objects.using(alias).get_or_create(singleton=True)


class Migration(migrations.Migration):

    initial = True

    dependencies = [
    ]

    operations = [
        migrations.CreateModel(
            name='KeyLock',
            fields=[
                ('key_hash', models.BigIntegerField(primary_key=True, serialize=False)),
                ('taken', models.BigIntegerField(default=0)),
            ],
            options={
                'db_table': 'outbox_key_lock',
            },
        ),
        migrations.CreateModel(
            name='LedgerEntry',
            fields=[
                ('transaction_id', models.UUIDField(primary_key=True, serialize=False)),
                ('state', models.CharField(choices=[('C', 'committed'), ('R', 'rolled back')], max_length=1)),
                ('created_at', models.DateTimeField(db_default=django.db.models.functions.datetime.Now())),
            ],
            options={
                'verbose_name_plural': 'ledger entries',
                'db_table': 'outbox_ledger',
            },
        ),
        migrations.CreateModel(
            name='InboxEntry',
            fields=[
                ('pk', models.CompositePrimaryKey('group', 'generation', 'message_id', blank=True, editable=False, primary_key=True, serialize=False)),
                ('group', models.CharField(db_column='consumer_group', max_length=127)),
                ('generation', models.IntegerField()),
                ('message_id', models.UUIDField()),
                ('handled_at', models.DateTimeField(db_default=django.db.models.functions.datetime.Now())),
            ],
            options={
                'verbose_name_plural': 'inbox entries',
                'db_table': 'outbox_inbox',
                'indexes': [models.Index(fields=['handled_at'], name='outbox_inbox_handled_at')],
            },
        ),
        migrations.CreateModel(
            name='LedgerIdentity',
            fields=[
                ('singleton', models.BooleanField(default=True, primary_key=True, serialize=False)),
                ('ledger_id', models.UUIDField(default=uuid.uuid4)),
                ('pruned_before', models.UUIDField(null=True)),
            ],
            options={
                'verbose_name_plural': 'ledger identities',
                'db_table': 'outbox_ledger_identity',
                'constraints': [models.CheckConstraint(condition=models.Q(('singleton', True)), name='outbox_one_ledger')],
            },
        ),
        migrations.RunPython(name_this_ledger, migrations.RunPython.noop),
    ]
