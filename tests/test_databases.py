"""A test may leave rows and objects in its database, and the next test does not find them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import psycopg
import pytest

from outbox.broker import embedded
from tests.databases import _ABOUT, Pool, Template, _read, drop_databases, new_name

MADE = """
CREATE TABLE parent (id int PRIMARY KEY, name text);
CREATE TABLE child (id int GENERATED ALWAYS AS IDENTITY, parent_id int NOT NULL REFERENCES parent, note text);
CREATE TABLE plain (at timestamptz, body bytea, twice int GENERATED ALWAYS AS (2) STORED);
CREATE UNLOGGED TABLE unlogged (id int);
CREATE SEQUENCE numbers;
CREATE FUNCTION one() RETURNS int LANGUAGE sql RETURN 1;
CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE 'refused'; END $$;
CREATE TRIGGER kept BEFORE TRUNCATE ON plain EXECUTE FUNCTION refuse();
INSERT INTO parent VALUES (1, 'seeded'), (2, E'tab\\t\\\\line\\n'), (3, NULL);
INSERT INTO child (parent_id, note) VALUES (1, 'first'), (2, 'second');
SELECT nextval('numbers');
"""
# Changes that are restored.
DATA = [
    "SELECT 1",
    "INSERT INTO plain VALUES (now(), 'x')",
    "BEGIN; INSERT INTO plain VALUES (now(), 'x'); ROLLBACK",
    "INSERT INTO plain SELECT now(), convert_to(repeat(i::text, 9999), 'utf8') FROM generate_series(1, 9) i",
    "INSERT INTO plain VALUES (now(), 'x'); DELETE FROM plain; VACUUM plain",
    "INSERT INTO unlogged VALUES (1)",
    "INSERT INTO parent VALUES (4, 'more')",
    "UPDATE parent SET name = 'changed' WHERE id = 1",
    "DELETE FROM child; DELETE FROM parent",
    "DELETE FROM child WHERE parent_id = 1",
    "UPDATE parent SET name = name",
    "INSERT INTO child (parent_id) VALUES (1); DELETE FROM child WHERE note IS NULL",
    "SELECT setval('numbers', 99)",
    "ANALYZE parent",
    "INSERT INTO plain SELECT now(), 'x' FROM generate_series(1, 99); VACUUM ANALYZE plain",
    "LISTEN something; SELECT pg_advisory_lock(7)",
    "SET work_mem = '1MB'",
]
# Changes that make it another database, or may have made it another one: it is dropped.
DEFINITIONS = [
    "TRUNCATE child, parent RESTART IDENTITY",
    "CREATE TABLE passing (id int); DROP TABLE passing",
    "REINDEX TABLE parent",
    "ALTER TABLE plain ADD COLUMN more int",
    "ALTER TABLE plain DROP COLUMN body",
    "ALTER TABLE plain ALTER COLUMN at SET DEFAULT now()",
    "ALTER TABLE plain ALTER COLUMN at SET STATISTICS 7",
    "ALTER TABLE plain SET (fillfactor = 50)",
    "ALTER TABLE plain RENAME TO other",
    "ALTER TABLE plain ENABLE ROW LEVEL SECURITY",
    "ALTER TABLE plain REPLICA IDENTITY FULL",
    "ALTER TABLE unlogged SET LOGGED",
    "ALTER TABLE parent ADD CHECK (id > 0)",
    "ALTER TABLE plain DISABLE TRIGGER kept",
    "DROP TRIGGER kept ON plain",
    "DROP TABLE child",
    "DROP TABLE plain; CREATE TABLE plain (at timestamptz, body bytea, twice int GENERATED ALWAYS AS (2) STORED)",
    "CREATE TABLE another (id int)",
    "CREATE VIEW seen AS SELECT 1 AS one",
    "CREATE POLICY mine ON plain USING (true)",
    "CREATE STATISTICS both_of_it ON at, body FROM plain",
    "CREATE OR REPLACE FUNCTION one() RETURNS int LANGUAGE sql RETURN 2",
    "ALTER FUNCTION one SET work_mem = '1MB'",
    "CREATE SCHEMA room",
    "CREATE DOMAIN short AS text CHECK (length(VALUE) < 9)",
    "CREATE PUBLICATION everything FOR ALL TABLES",
    "ALTER SEQUENCE numbers INCREMENT 2",
    "CREATE SEQUENCE more",
    "COMMENT ON TABLE plain IS 'seen'",
    "GRANT SELECT ON plain TO PUBLIC",
    "GRANT CREATE ON SCHEMA public TO PUBLIC",
    "REVOKE EXECUTE ON FUNCTION pg_catalog.pg_sleep FROM PUBLIC",
    "ALTER DEFAULT PRIVILEGES GRANT SELECT ON TABLES TO PUBLIC",
    "DO $$ BEGIN EXECUTE format('ALTER DATABASE %I SET work_mem = ''1MB''', current_database()); END $$",
    "DO $$ BEGIN EXECUTE format('ALTER ROLE postgres IN DATABASE %I SET jit = off', current_database()); END $$",
    "DO $$ BEGIN EXECUTE format('ALTER DATABASE %I CONNECTION LIMIT 3', current_database()); END $$",
    "DO $$ BEGIN EXECUTE format('REVOKE CONNECT ON DATABASE %I FROM PUBLIC', current_database()); END $$",
    "SELECT lo_create(0)",
    # The last, because no rollback takes back that the table has had an index.
    "CREATE INDEX ON plain (at)",
]


@pytest.fixture(scope="module")
def template(server_url: str) -> Iterator[str]:
    """A template with rows."""
    name = new_name()
    with psycopg.connect(embedded.create_database(server_url, name), autocommit=True) as connection:
        connection.execute(MADE)
    yield name
    drop_databases(server_url, [name])


@pytest.fixture(scope="module")
def pool(server_url: str) -> Iterator[Pool]:
    """A pool of this module's own."""
    pool = Pool(server_url)
    yield pool
    pool.close()


def test_data_are_put_back(pool: Pool, template: str, server_url: str) -> None:
    before = state(server_url, template)
    name = pool.take(template)
    oid = _oid(server_url, name)
    for statements in DATA:
        with psycopg.connect(embedded.database_url(server_url, name), autocommit=True) as connection:
            # One by one: VACUUM wants no transaction around it.
            for statement in statements.split("; "):
                connection.execute(statement)
            pool.give_back(name, template)
        name = pool.take(template)
        assert _oid(server_url, name) == oid, statements
        assert state(server_url, name) == before, statements
    pool.give_back(name, template)


def test_a_redefined_object_is_found(pool: Pool, template: str, server_url: str) -> None:
    pool.give_back(pool.take(template), template)
    name = pool.take(template)
    copied = pool._templates[template]
    with psycopg.connect(embedded.database_url(server_url, name), autocommit=True) as connection:
        for statements in DEFINITIONS:
            assert copied._written(connection) == set(), statements
            with connection.transaction(force_rollback=True):
                connection.execute(statements)
                is_about_all = connection.execute(_ABOUT).fetchall() != copied._about
            connection.execute("SELECT pg_stat_force_next_flush()")
            # The server counts the write, although it was rolled back. What is about the whole database has no count.
            assert copied._written(connection) == (set() if is_about_all else None), statements
            copied.count_anew(connection)
    pool.give_back(name, template)


def test_a_database_with_another_definition_is_dropped(pool: Pool, template: str, server_url: str) -> None:
    name = pool.take(template)
    oid = _oid(server_url, name)
    with psycopg.connect(embedded.database_url(server_url, name), autocommit=True) as connection:
        connection.execute("DROP TABLE child")
    pool.give_back(name, template)
    after = pool.take(template)
    assert _oid(server_url, after) != oid
    assert not _name(server_url, oid)
    assert state(server_url, after) == state(server_url, template)
    pool.give_back(after, template)


def test_open_connections_are_closed_and_cannot_return(server_url: str, pool: Pool, template: str) -> None:
    """With what he locked, wrote and listens to."""
    before = pool.take(template)
    oid, url = _oid(server_url, before), embedded.database_url(server_url, before)
    with contextlib.closing(psycopg.connect(url)) as session:
        session.execute("LISTEN something")
        session.commit()
        session.execute("SELECT pg_advisory_lock(7)")
        session.execute("INSERT INTO plain VALUES (now(), 'never committed')")
        pool.give_back(before, template)
        with pytest.raises(psycopg.OperationalError, match="terminating connection"):
            session.execute("COMMIT")
    with pytest.raises(psycopg.OperationalError, match="does not exist"):
        psycopg.connect(url)
    after = pool.take(template)
    assert _oid(server_url, after) == oid
    assert state(server_url, after) == state(server_url, template)
    with psycopg.connect(embedded.database_url(server_url, after)) as connection:
        locked = connection.execute("SELECT FROM pg_locks WHERE locktype = 'advisory' AND database = %s", [oid])
        assert locked.fetchall() == []
    pool.give_back(after, template)


def test_a_prepared_transaction_is_an_error_of_the_test(server_url: str, pool: Pool, template: str) -> None:
    name = pool.take(template)
    with psycopg.connect(embedded.database_url(server_url, name), autocommit=True) as connection:
        connection.execute("BEGIN")
        connection.execute("INSERT INTO plain VALUES (now(), 'x')")
        connection.execute("PREPARE TRANSACTION 'left'")
    with pytest.raises(psycopg.errors.ObjectInUse, match="prepared transaction"):
        pool.give_back(name, template)
    with psycopg.connect(embedded.database_url(server_url, name), autocommit=True) as connection:
        connection.execute("ROLLBACK PREPARED 'left'")
    pool.give_back(name, template)


def state(server_url: str, name: str) -> tuple[object, ...]:
    """All that a database is, apart from the sizes of its files."""
    found = Template(server_url, name)
    plans = {table: figures[2:] for table, figures in found.data.tables.items()}
    with psycopg.connect(embedded.database_url(server_url, name), options="-c search_path=") as connection:
        statistics = connection.execute("SELECT starelid FROM pg_statistic WHERE starelid >= 16384").fetchall()
        rows = {table: _read(connection, table) for table in plans}
    return plans, rows, found.data.sequences, statistics


def _oid(server_url: str, name: str) -> int:
    with psycopg.connect(server_url) as connection:
        found = connection.execute("SELECT oid FROM pg_database WHERE datname = %s", [name]).fetchone()
    assert found is not None
    return int(found[0])


def _name(server_url: str, oid: int) -> str:
    with psycopg.connect(server_url) as connection:
        found = connection.execute("SELECT datname FROM pg_database WHERE oid = %s", [oid]).fetchone()
    return str(found[0]) if found else ""
