from typing import Any

from django.db import migrations, router

# If a ledger row is removed while a check may still ask about its transaction, the checker answers ROLLBACK for a
# transaction that has committed. Rows with ids below `pruned_before` may be removed: if such a row is missing, the
# checker does not answer ROLLBACK. If all rows are removed, the ledger gets a new ledger id, which no half message
# contains. On PostgreSQL, a trigger refuses to delete rows with ids from `pruned_before` on. The trigger runs once per
# DELETE statement and never for an INSERT. On SQLite, Django's flush deletes the rows with DELETE, so the trigger does
# not refuse this deletion, but gives the ledger a new id. If Django alters a table on SQLite, Django makes the table
# again, which drops the triggers of the table. So a migration that alters outbox_ledger must create the triggers again.

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

_GUARDS = {"postgresql": _POSTGRESQL, "sqlite": _SQLITE}

_REMOVALS = {
    "postgresql": """
DROP TRIGGER outbox_ledger_truncated ON outbox_ledger;
DROP TRIGGER outbox_ledger_deleted ON outbox_ledger;
DROP FUNCTION outbox_ledger_guard();
""",
    "sqlite": "DROP TRIGGER outbox_ledger_deleted",
}


def guard(apps: Any, schema_editor: Any) -> None:
    _execute(apps, schema_editor, _GUARDS)


def leave_unguarded(apps: Any, schema_editor: Any) -> None:
    _execute(apps, schema_editor, _REMOVALS)


def _execute(apps: Any, schema_editor: Any, statements: dict[str, str]) -> None:
    connection = schema_editor.connection
    ledger = apps.get_model("outbox", "LedgerEntry")
    if connection.vendor in statements and router.allow_migrate_model(connection.alias, ledger):
        schema_editor.execute(statements[connection.vendor], params=None)


class Migration(migrations.Migration):

    dependencies = [
        ('outbox', '0002_finding'),
    ]

    operations = [
        migrations.RunPython(guard, leave_unguarded),
    ]
