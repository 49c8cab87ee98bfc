"""What the catalogue says of a new installation, and of one that was upgraded change by change: it is equal."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import psycopg
import pytest

from outbox.broker.schema.install import install
from tests.broker.schema.versions import NEXT, SCHEMA, become_next

# Each query returns a name and the whole row of a system catalogue as JSON, without the columns that count or place
# things (oids, files, statistics, `atthasmissing`), and with the text of each expression.
CATALOGUES: Final = {
    "schema": """
        SELECT nspname, jsonb_build_object('owner', nspowner, 'acl', nspacl::text,
                                           'comment', obj_description(oid, 'pg_namespace'))
        FROM pg_namespace WHERE nspname = 'outbox'""",
    "relations": """
        SELECT relname, to_jsonb(c) - '{oid,relnamespace,reltype,relfilenode,relpages,reltuples,relallvisible,
                                        relallfrozen,reltoastrelid,relfrozenxid,relminmxid}'::text[]
               || jsonb_build_object('comment', obj_description(oid, 'pg_class'), 'view', pg_get_viewdef(oid, true),
                                     'index', CASE WHEN relkind = 'i' THEN pg_get_indexdef(oid) END)
        FROM pg_class c WHERE relnamespace = 'outbox'::regnamespace""",
    "columns": """
        SELECT attrelid::regclass || '.' || attnum,
               to_jsonb(a) - '{attrelid,atthasmissing,attmissingval,attcacheoff,atttypid}'::text[]
               || jsonb_build_object('type', format_type(atttypid, atttypmod),
                                     'comment', col_description(attrelid, attnum),
                                     'default', (SELECT pg_get_expr(adbin, adrelid) FROM pg_attrdef
                                                 WHERE adrelid = attrelid AND adnum = attnum))
        FROM pg_attribute a JOIN pg_class c ON c.oid = attrelid
        WHERE relnamespace = 'outbox'::regnamespace AND attnum > 0""",
    "constraints": """
        SELECT coalesce(conrelid::regclass::text, '') || ' ' || conname,
               to_jsonb(c) - '{oid,connamespace,conrelid,conindid,confrelid,conbin,conpfeqop,
                                        conppeqop,conffeqop,conexclop}'::text[]
               || jsonb_build_object('definition', pg_get_constraintdef(oid),
                                     'comment', obj_description(oid, 'pg_constraint'))
        FROM pg_constraint c WHERE connamespace = 'outbox'::regnamespace""",
    "indexes": """
        SELECT indexrelid::regclass::text, to_jsonb(i) - '{indexrelid,indrelid,indexprs,indpred,indcheckxmin}'::text[]
        FROM pg_index i JOIN pg_class c ON c.oid = indexrelid WHERE relnamespace = 'outbox'::regnamespace""",
    "sequences": """
        SELECT schemaname || '.' || sequencename, to_jsonb(s) FROM pg_sequences s WHERE schemaname = 'outbox'""",
    "functions": """
        SELECT oid::regprocedure::text,
               to_jsonb(p) - '{oid,pronamespace,proargtypes,proargdefaults,prorettype,proallargtypes}'::text[]
               || jsonb_build_object('definition', pg_get_functiondef(oid), 'comment', obj_description(oid, 'pg_proc'))
        FROM pg_proc p WHERE pronamespace = 'outbox'::regnamespace""",
    "triggers": """
        SELECT tgrelid::regclass || ' ' ||
               CASE WHEN tgisinternal THEN (SELECT conname FROM pg_constraint k WHERE k.oid = tgconstraint) || tgtype
                    ELSE tgname END,
               jsonb_build_object('enabled', tgenabled, 'internal', tgisinternal, 'function', tgfoid::regproc,
                                  'definition', CASE WHEN NOT tgisinternal THEN pg_get_triggerdef(t.oid) END)
        FROM pg_trigger t JOIN pg_class c ON c.oid = tgrelid WHERE relnamespace = 'outbox'::regnamespace""",
    "rules": """
        SELECT ev_class::regclass || ' ' || rulename,
               jsonb_build_object('enabled', ev_enabled, 'rule', pg_get_ruledef(r.oid))
        FROM pg_rewrite r JOIN pg_class c ON c.oid = ev_class WHERE relnamespace = 'outbox'::regnamespace""",
    "types": """
        SELECT typname,
               jsonb_build_object('kind', typtype, 'acl', typacl::text, 'comment', obj_description(oid, 'pg_type'))
        FROM pg_type WHERE typnamespace = 'outbox'::regnamespace""",
    "policies": """
        SELECT polrelid::regclass || ' ' || polname, to_jsonb(p) - '{oid,polrelid}'::text[] FROM pg_policy p""",
    "statistics": """
        SELECT stxname, jsonb_build_object('definition', pg_get_statisticsobjdef(oid)) FROM pg_statistic_ext""",
    "default rights": """
        SELECT defaclobjtype::text, jsonb_build_object('acl', defaclacl::text) FROM pg_default_acl""",
}
# Beside times.
EACH_ITS_OWN: Final = {"broker_id"}

DIFFERENCES: Final = [
    "ALTER TABLE outbox.commit_log ADD COLUMN more text",
    "ALTER TABLE outbox.commit_log ALTER COLUMN tag DROP NOT NULL",
    "ALTER TABLE outbox.commit_log ALTER COLUMN body SET STORAGE EXTERNAL",
    "ALTER TABLE outbox.commit_log ALTER COLUMN stored_at SET DEFAULT clock_timestamp()",
    "ALTER TABLE outbox.commit_log ALTER COLUMN key SET STATISTICS 500",
    "ALTER TABLE outbox.commit_log SET (autovacuum_enabled = off)",
    "ALTER TABLE outbox.held ALTER COLUMN topic_id TYPE bigint",
    "ALTER TABLE outbox.life_sign SET LOGGED",
    "ALTER TABLE outbox.tick DISABLE TRIGGER ALL; ALTER TABLE outbox.queue DISABLE TRIGGER ALL",
    "ALTER TABLE outbox.topic DROP CONSTRAINT topic_on_park_check",
    "ALTER TABLE outbox.vanished_trial DROP CONSTRAINT vanished_trial_group_id_log_id_fkey,"
    " ADD CONSTRAINT vanished_trial_group_id_log_id_fkey FOREIGN KEY (group_id, log_id)"
    " REFERENCES outbox.quarantined_message",
    "DROP INDEX outbox.topic_fifo",
    "DROP INDEX outbox.op_log_xid; CREATE INDEX op_log_xid ON outbox.op_log (xid DESC)",
    "ALTER INDEX outbox.commit_log_stored_at SET (pages_per_range = 32)",
    "ALTER TABLE outbox.incident ALTER COLUMN incident_id SET CACHE 10",
    "CREATE SEQUENCE outbox.more",
    "CREATE OR REPLACE VIEW outbox.check_v1 AS SELECT transaction_id, checked_at, answer, detail"
    " FROM outbox.check_history WHERE answer <> ''",
    "ALTER VIEW outbox.group_v1 SET (security_invoker = true)",
    "ALTER FUNCTION outbox.key_shard(text) VOLATILE",
    "ALTER FUNCTION outbox.publish_bytes RESET search_path",
    "GRANT EXECUTE ON FUNCTION outbox.publish TO PUBLIC",
    "CREATE FUNCTION outbox.more() RETURNS integer LANGUAGE sql AS 'SELECT 1'",
    "CREATE TRIGGER more BEFORE UPDATE ON outbox.tick"
    " FOR EACH ROW EXECUTE FUNCTION suppress_redundant_updates_trigger()",
    "CREATE RULE more AS ON DELETE TO outbox.tick DO INSTEAD NOTHING",
    "CREATE POLICY more ON outbox.topic USING (true)",
    "CREATE STATISTICS outbox.more ON topic_id, key FROM outbox.held",
    "GRANT SELECT ON outbox.topic TO PUBLIC",
    "COMMENT ON COLUMN outbox.queue.number IS NULL",
    "COMMENT ON TABLE outbox.topic IS 'more'",
    "INSERT INTO outbox.producer_group VALUES ('more', now())",
    "UPDATE outbox.tick SET appended = 1",
    "UPDATE outbox.schema_version SET version = version + 1",
    # The last, because no rollback takes it back.
    "SELECT nextval('outbox.incident_incident_id_seq')",
]


Catalogue = dict[str, dict[str, str]]


def catalogue(connection: psycopg.Connection[Any]) -> Catalogue:
    """Everything that the catalogue says about the schema, and all rows of all tables."""
    return dict(parts(connection))


def parts(connection: psycopg.Connection[Any]) -> Iterator[tuple[str, dict[str, str]]]:
    """The catalogue, part by part."""
    for kind, query in CATALOGUES.items():
        rows = connection.execute(query.encode()).fetchall()
        found = {name: json.dumps(facts, sort_keys=True, indent=1) for name, facts in rows}
        assert len(found) == len(rows), f"two {kind} have one name"
        yield kind, found
    columns = connection.execute(
        "SELECT relname, array_agg(quote_ident(attname) || '::text' ORDER BY attnum) FROM pg_class c"
        " LEFT JOIN pg_attribute ON attrelid = c.oid AND attnum > 0 AND NOT attisdropped"
        " AND atttypid <> 'timestamptz'::regtype AND attname <> ALL (%s)"
        " WHERE relnamespace = 'outbox'::regnamespace AND relkind = 'r' GROUP BY relname",
        [list(EACH_ITS_OWN)],
    ).fetchall()
    rows_of_all = " UNION ALL ".join(
        f"SELECT '{table}', ARRAY[{', '.join(names)}]::text FROM outbox.{table}" for table, names in columns
    )
    of_tables = sorted(connection.execute(rows_of_all.encode()).fetchall())
    yield "rows", {f"{table} {number}": row for number, (table, row) in enumerate(of_tables)}


def differing(found: Catalogue, wanted: Catalogue) -> list[str]:
    """What one of them lacks, or has with other facts."""
    return [
        f"{kind} {name}: {found.get(kind, {}).get(name)} is not {wanted.get(kind, {}).get(name)}"
        for kind in sorted(found.keys() | wanted.keys())
        for name in sorted(found.get(kind, {}).keys() | wanted.get(kind, {}).keys())
        if found.get(kind, {}).get(name) != wanted.get(kind, {}).get(name)
    ]


@pytest.fixture
def fresh(broker_url: str) -> Catalogue:
    with psycopg.connect(broker_url) as connection:
        return catalogue(connection)


def test_a_new_and_an_upgraded_database_are_equal(
    broker_url: str, new_database: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    become_next(tmp_path / "schema", monkeypatch)
    with psycopg.connect(new_database(), autocommit=True) as new, psycopg.connect(broker_url, autocommit=True) as old:
        assert install(new, "outbox") == install(old, "outbox") == NEXT
        fresh = catalogue(new)
        assert differing(catalogue(old), fresh) == []
    assert {"commit_log", "message_v1", "queue_closing", "extra"} <= fresh["relations"].keys()
    assert all(fresh[kind] for kind in ("columns", "constraints", "indexes", "sequences", "triggers", "rows"))


def test_each_function_stands_once_in_a_file_of_its_name(fresh: Catalogue) -> None:
    files = {path.stem: path.read_text(encoding="utf-8") for path in (SCHEMA / "functions").glob("*.sql")}
    created = re.compile(r"^CREATE (?:OR REPLACE )?FUNCTION (\w+)", re.MULTILINE)
    assert {name: created.findall(text) for name, text in files.items()} == {name: [name] for name in files}
    others = [path for path in SCHEMA.rglob("*.sql") if path.parent.name != "functions"]
    assert [path.name for path in others if created.search(path.read_text(encoding="utf-8"))] == []
    # A part has its functions beside its tables.
    parts = SCHEMA.parent.parent.glob("contrib/*/schema/current.sql")
    of_parts = {name for path in parts for name in created.findall(path.read_text(encoding="utf-8"))}
    made = {name.partition("(")[0].removeprefix("outbox.") for name in fresh["functions"]}
    assert (made, of_parts & set(files)) == (set(files) | of_parts, set())


def test_every_planted_difference_is_found(broker_url: str, fresh: Catalogue) -> None:
    with psycopg.connect(broker_url, autocommit=True) as connection:
        assert catalogue(connection) == fresh
        missed = []
        for difference in DIFFERENCES:
            with connection.transaction(force_rollback=True):
                connection.execute(difference.encode())
                if all(found == fresh[kind] for kind, found in parts(connection)):
                    missed.append(difference)
        assert missed == []


def test_an_upgrade_leaves_the_rights_on_functions(
    broker_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    become_next(tmp_path / "schema", monkeypatch)
    with psycopg.connect(broker_url, autocommit=True) as connection:
        rights = "SELECT proname, proacl::text FROM pg_proc WHERE pronamespace = 'outbox'::regnamespace ORDER BY 1"
        connection.execute("GRANT EXECUTE ON FUNCTION outbox.publish TO PUBLIC")
        before = connection.execute(rights.encode()).fetchall()
        assert install(connection, "outbox") == NEXT
        assert connection.execute(rights.encode()).fetchall() == before
