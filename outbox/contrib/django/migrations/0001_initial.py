import uuid
from typing import Any

import django.db.models.functions.datetime
from django.db import migrations, models, router

from outbox.contrib.django.database.columns import compare_as_postgresql

# If a ledger row is removed while a check may still ask about its transaction, the checker answers ROLLBACK for a
# transaction that has committed. Rows with ids below `pruned_before` may be removed: if such a row is missing, the
# checker does not answer ROLLBACK. If all rows are removed, the ledger gets a new ledger id, which no half message
# contains. On PostgreSQL, a trigger refuses to delete rows with ids from `pruned_before` on. The trigger runs once per
# DELETE statement and never for an INSERT. On SQLite and MariaDB, Django's flush deletes the rows with DELETE, so the
# trigger does not refuse this deletion, but gives the ledger a new id. If Django alters a table on SQLite, Django makes
# the table again, which drops the triggers of the table. So a migration that alters outbox_ledger must create the
# triggers again.

_POSTGRESQL = """
CREATE FUNCTION outbox_ledger_guard() RETURNS trigger LANGUAGE plpgsql AS $$
DECLARE
    early uuid;
BEGIN
    IF TG_OP = 'TRUNCATE' THEN
        EXECUTE format('UPDATE %I.outbox_ledger_identity SET ledger_id = gen_random_uuid()', TG_TABLE_SCHEMA);
        RETURN NULL;
    END IF;
    EXECUTE format(
        'SELECT transaction_id FROM gone WHERE NOT EXISTS '
        '(SELECT FROM %I.outbox_ledger_identity WHERE pruned_before > transaction_id) LIMIT 1', TG_TABLE_SCHEMA)
        INTO early;
    IF early IS NOT NULL THEN
        RAISE EXCEPTION USING
            ERRCODE = 'restrict_violation',
            MESSAGE = format('rows of outbox_ledger may still be asked about (transaction %s): not deleted', early),
            HINT = 'Pruning removes rows once the broker shows their transactions decided (run_prune; Celery beat and '
                   'outbox_worker call it). TRUNCATE empties the ledger and makes it another one.';
    END IF;
    RETURN NULL;
END
$$;
CREATE TRIGGER outbox_ledger_deleted AFTER DELETE ON outbox_ledger
    REFERENCING OLD TABLE AS gone FOR EACH STATEMENT EXECUTE FUNCTION outbox_ledger_guard();
CREATE TRIGGER outbox_ledger_truncated AFTER TRUNCATE ON outbox_ledger
    FOR EACH STATEMENT EXECUTE FUNCTION outbox_ledger_guard();
"""

_SQLITE = """
CREATE TRIGGER outbox_ledger_deleted AFTER DELETE ON outbox_ledger
WHEN NOT EXISTS (SELECT 1 FROM outbox_ledger_identity WHERE pruned_before > OLD.transaction_id)
BEGIN
    UPDATE outbox_ledger_identity SET ledger_id = lower(hex(randomblob(16)));
END
"""

_MARIADB = """
CREATE OR REPLACE TRIGGER outbox_ledger_deleted AFTER DELETE ON outbox_ledger FOR EACH ROW
IF NOT EXISTS (SELECT 1 FROM outbox_ledger_identity WHERE pruned_before > OLD.transaction_id) THEN
    UPDATE outbox_ledger_identity SET ledger_id = REPLACE(UUID(), '-', '');
END IF
"""

_GUARDS = {"postgresql": _POSTGRESQL, "sqlite": _SQLITE, "mariadb": _MARIADB}

_REMOVALS = {
    "postgresql": """
DROP TRIGGER outbox_ledger_truncated ON outbox_ledger;
DROP TRIGGER outbox_ledger_deleted ON outbox_ledger;
DROP FUNCTION outbox_ledger_guard();
""",
    "sqlite": "DROP TRIGGER outbox_ledger_deleted",
    "mariadb": "DROP TRIGGER IF EXISTS outbox_ledger_deleted",
}

# By default, autovacuum waits until a fifth of a table is dead. Pruning deletes a fourteenth of the inbox each day, so
# three days of deleted rows would wait for vacuum, and their space would not be used again before.
_INBOX = "ALTER TABLE outbox_inbox SET (autovacuum_vacuum_scale_factor = 0.05)"


def prepare_postgresql(apps: Any, schema_editor: Any) -> None:
    """Set how autovacuum of the busiest table works."""
    if schema_editor.connection.vendor == "postgresql" and _has(apps, schema_editor, "InboxEntry"):
        schema_editor.execute(_INBOX, params=None)


def guard(apps: Any, schema_editor: Any) -> None:
    """Create the triggers that keep rows of the ledger."""
    _execute(apps, schema_editor, _GUARDS)


def leave_unguarded(apps: Any, schema_editor: Any) -> None:
    """Drop the triggers again."""
    _execute(apps, schema_editor, _REMOVALS)


def name_this_ledger(apps: Any, schema_editor: Any) -> None:
    """Give this database's ledger its id, unless the database has no ledger (a dedicated broker database)."""
    if _has(apps, schema_editor, "LedgerIdentity"):
        identity = apps.get_model("outbox", "LedgerIdentity")
        identity.objects.using(schema_editor.connection.alias).get_or_create(singleton=True)


def _execute(apps: Any, schema_editor: Any, statements: dict[str, str]) -> None:
    statement = statements.get(_dialect(schema_editor))
    if statement is not None and _has(apps, schema_editor, "LedgerEntry"):
        schema_editor.execute(statement, params=None)


def _dialect(schema_editor: Any) -> str:
    connection = schema_editor.connection
    return "mariadb" if connection.vendor == "mysql" and connection.mysql_is_mariadb else str(connection.vendor)


def _has(apps: Any, schema_editor: Any, model: str) -> bool:
    """Return whether this database has the table of the model."""
    return bool(router.allow_migrate_model(schema_editor.connection.alias, apps.get_model("outbox", model)))


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
        migrations.CreateModel(
            name='OperatorAction',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('at', models.DateTimeField(db_default=django.db.models.functions.datetime.Now())),
                ('ended_at', models.DateTimeField(null=True)),
                ('who', models.CharField(max_length=255)),
                ('why', models.TextField()),
                ('action', models.CharField(max_length=63)),
                ('subject', models.TextField()),
                ('effect', models.TextField()),
                ('before', models.JSONField(default=dict)),
                ('after', models.JSONField(default=dict)),
                ('outcome', models.CharField(choices=[('begun', 'begun'), ('done', 'done'), ('failed', 'failed')], default='begun', max_length=15)),
            ],
            options={
                'db_table': 'outbox_operator_action',
                'permissions': [('view_operations', 'Can see the operations page'), ('act', 'Can act on the operations page'), ('view_bodies', 'Can see bodies and headers of messages')],
                'default_permissions': ('view',),
            },
        ),
        migrations.CreateModel(
            name='ClaimEntry',
            fields=[
                ('pk', models.CompositePrimaryKey('group', 'generation', 'message_id', blank=True, editable=False, primary_key=True, serialize=False)),
                ('group', models.CharField(db_column='consumer_group', max_length=127)),
                ('generation', models.IntegerField()),
                ('message_id', models.UUIDField()),
                ('token', models.BigIntegerField()),
                ('claimed_by', models.CharField(max_length=255)),
                ('claimed_at', models.DateTimeField()),
                ('expires_at', models.DateTimeField()),
                ('attempt', models.IntegerField()),
            ],
            options={
                'verbose_name': 'claim',
                'db_table': 'outbox_claim',
                'indexes': [models.Index(fields=['expires_at'], name='outbox_claim_expires_at')],
            },
        ),
        migrations.CreateModel(
            name='StepEntry',
            fields=[
                ('pk', models.CompositePrimaryKey('group', 'generation', 'message_id', 'name', blank=True, editable=False, primary_key=True, serialize=False)),
                ('group', models.CharField(db_column='consumer_group', max_length=127)),
                ('generation', models.IntegerField()),
                ('message_id', models.UUIDField()),
                ('name', models.CharField(max_length=127)),
                ('attempt', models.IntegerField()),
                ('begun_at', models.DateTimeField()),
                ('ended_at', models.DateTimeField(null=True)),
                ('result', models.BinaryField(null=True)),
            ],
            options={
                'verbose_name': 'step',
                'db_table': 'outbox_step',
                'indexes': [models.Index(fields=['begun_at'], name='outbox_step_begun_at')],
            },
        ),
        migrations.CreateModel(
            name='RaisedCondition',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('name', models.CharField(max_length=63)),
                ('subject', models.CharField(max_length=400)),
                ('severity', models.SmallIntegerField()),
                ('raised_at', models.DateTimeField()),
                ('seen_at', models.DateTimeField()),
            ],
            options={
                'verbose_name': 'raised condition',
                'db_table': 'outbox_raised_condition',
                'constraints': [models.UniqueConstraint(fields=('name', 'subject'), name='outbox_one_raised_condition')],
            },
        ),
        migrations.RunPython(name_this_ledger, migrations.RunPython.noop),
        # MariaDB ends a transaction at each of these statements, and Django refuses them in one.
        migrations.RunPython(compare_as_postgresql('outbox'), migrations.RunPython.noop, atomic=False),
        migrations.RunPython(prepare_postgresql, migrations.RunPython.noop),
        migrations.RunPython(guard, leave_unguarded, atomic=False),
    ]
