"""A part's tables in the broker's schema: installed, upgraded, refused, dropped, and who leads when services differ."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar
from uuid import uuid4

import psycopg
import pytest

from outbox import hooks
from outbox.broker.database.connection import BrokerDatabase
from outbox.broker.database.executor import Executor
from outbox.broker.leading import LeaderSettings
from outbox.broker.operations.deletion import empty
from outbox.broker.operations.rules import survey
from outbox.broker.schema import catalogue
from outbox.broker.schema import install as schema_install
from outbox.broker.schema.install import SCHEMA_VERSION, check_schema, install, missing_parts
from outbox.broker.schema.uninstall import drop_part, rows_of_part, uninstall
from outbox.broker.sequencer.leader_lease import LeaderLease
from outbox.errors import SchemaError, UsageError
from outbox.utils.periodic import BackgroundLoop
from tests.broker.support import process
from tests.support import eventually

FIRST = {
    "current.sql": """-- Locks: consumer_group
CREATE TABLE greeting (
    greeting_id integer GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    group_id integer REFERENCES consumer_group, text text
);
CREATE VIEW greeting_v1 AS SELECT text FROM greeting;
""",
    "functions/greet.sql": """
CREATE OR REPLACE FUNCTION greet() RETURNS text LANGUAGE sql AS $$ SELECT text FROM other() $$;
""",
    "functions/other.sql": """
CREATE OR REPLACE FUNCTION other() RETURNS SETOF greeting LANGUAGE sql AS $$ TABLE greeting $$;
""",
}
SECOND = {
    **FIRST,
    "current.sql": FIRST["current.sql"].replace("text text", "text text, language text") + "CREATE TABLE tongue ();\n",
    "changes/0002_language.sql": """-- Locks: greeting
ALTER TABLE greeting ADD language text;
CREATE TABLE tongue ();
""",
}
OBJECTS = {"greeting", "greeting_greeting_id_seq", "greeting_v1", "greet", "other"}


class Greeting:
    """The leader's work of the part: it notes that the leader looks."""

    looks: ClassVar[list[float]] = []

    def __init__(self, database: BrokerDatabase) -> None:
        self.look_at = 0.0
        self.loop = BackgroundLoop(
            "greeting", lambda stopping: None, every_seconds=10, first_seconds=None, expected=(psycopg.Error,)
        )

    def look(self, run: Executor, now: float) -> None:
        self.looks.append(now)
        self.look_at = now + 10


class Service:
    """The parts of this process: those of another service, or of another version of the code."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self._folder, self._patch = folder, patch
        patch.syspath_prepend(str(folder))

    def has(self, files: dict[str, str] | None, *, leads: bool = False) -> None:
        """Have the part `greeting` with these files, or no part."""
        self._patch.setattr(hooks, "schemas", {})
        self._patch.setattr(hooks, "leader_work", {})
        # They read and write the tables of the parts.
        for name in ("broker_conditions", "subscription_rows", "waits"):
            self._patch.setattr(hooks, name, {})
        if files is None:
            return
        package = f"greeting_{uuid4().hex}"
        for name, text in files.items():
            path = self._folder / package / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        (self._folder / package / "__init__.py").touch()
        hooks.add_schema("greeting", package)
        if leads:
            hooks.add_leader_work("greeting", f"{__name__}.Greeting")


@pytest.fixture
def service(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Service:
    return Service(tmp_path, monkeypatch)


@pytest.fixture
def bare(new_database: Callable[..., str], service: Service) -> Iterator[psycopg.Connection[Any]]:
    """A connection to a database with the core's tables only."""
    service.has(None)
    with psycopg.connect(new_database(), autocommit=True) as connection:
        install(connection)
        yield connection


def recorded(connection: psycopg.Connection[Any]) -> list[tuple[Any, ...]]:
    rows = connection.execute(
        "SELECT name, version, minimum_code, leads, objects FROM outbox.schema_version WHERE name <> 'core'"
    ).fetchall()
    return [(*row[:-1], set(row[-1])) for row in rows]


def test_a_part_is_installed_after_the_core_and_by_itself(
    bare: psycopg.Connection[Any], service: Service, new_database: Callable[..., str]
) -> None:
    assert recorded(bare) == []
    service.has(FIRST)
    assert missing_parts(bare) == ["greeting"]
    with pytest.raises(SchemaError, match=r"the part 'greeting' are missing .* run `manage\.py migrate"):
        check_schema(bare)
    assert install(bare) == check_schema(bare) == install(bare) == SCHEMA_VERSION
    assert recorded(bare) == [("greeting", 1, 1, False, OBJECTS)]
    assert missing_parts(bare) == []
    with psycopg.connect(new_database(), autocommit=True) as new:
        assert install(new) == SCHEMA_VERSION
        assert recorded(new) == recorded(bare)
    service.has(None)
    assert check_schema(bare) == install(bare) == SCHEMA_VERSION


def test_a_part_is_upgraded_and_its_former_code_works_on(bare: psycopg.Connection[Any], service: Service) -> None:
    service.has(FIRST)
    install(bare)
    service.has(SECOND)
    with pytest.raises(SchemaError, match=r"'greeting' have version 1 .* needs version 2"):
        check_schema(bare)
    with psycopg.connect(bare.info.dsn) as holder:
        holder.execute("SELECT FROM outbox.greeting")
        with pytest.raises(SchemaError, match="used one of greeting"):
            install(bare, patience_seconds=0.0)
    assert recorded(bare) == [("greeting", 1, 1, False, OBJECTS)]
    install(bare)
    assert recorded(bare) == [("greeting", 2, 1, False, OBJECTS | {"tongue"})]
    bare.execute("SELECT language FROM outbox.greeting")
    service.has(FIRST)
    assert check_schema(bare) == install(bare) == SCHEMA_VERSION
    service.has({**SECOND, "changes/0003_x.sql": "UPDATE schema_version SET minimum_code = 3 WHERE name = 'greeting'"})
    install(bare)
    service.has(SECOND)
    for work in (install, check_schema):
        with pytest.raises(SchemaError, match=r"'greeting' .* version 3 and need code of at least version 3"):
            work(bare)


def test_an_error_in_the_files_of_a_part_leaves_the_core(bare: psycopg.Connection[Any], service: Service) -> None:
    service.has({**FIRST, "functions/wrong.sql": "CREATE FUNCTION wrong("})
    with pytest.raises(psycopg.errors.SyntaxError):
        install(bare)
    assert recorded(bare) == []
    assert bare.execute("SELECT to_regclass('outbox.greeting')").fetchone() == (None,)
    service.has(None)
    assert check_schema(bare) == SCHEMA_VERSION


def test_a_part_locks_the_tables_that_it_names(bare: psycopg.Connection[Any], service: Service) -> None:
    """Its new table refers to a table that is in use."""
    service.has(FIRST)
    with psycopg.connect(bare.info.dsn) as holder:
        holder.execute("INSERT INTO outbox.consumer_group (name) VALUES ('mail')")
        with pytest.raises(SchemaError, match="used one of consumer_group"):
            install(bare, patience_seconds=0.0)
    assert schema_install.installed_version(bare) == SCHEMA_VERSION


def test_tables_of_a_part_that_this_process_lacks_are_emptied_and_dropped_with_the_rest(
    bare: psycopg.Connection[Any], service: Service
) -> None:
    service.has(FIRST)
    install(bare)
    bare.execute("INSERT INTO outbox.consumer_group (name) VALUES ('mail')")
    bare.execute("INSERT INTO outbox.greeting (group_id, text) SELECT group_id, 'hello' FROM outbox.consumer_group")
    service.has(None)
    empty(Executor(bare, "outbox"))
    assert bare.execute("SELECT count(*) FROM outbox.greeting").fetchone() == (0,)
    bare.execute("CREATE TABLE outbox.foreign_to_all ()")
    with pytest.raises(SchemaError, match=r"not part of the broker \(foreign_to_all\)"):
        uninstall(bare)
    bare.execute("DROP TABLE outbox.foreign_to_all")
    uninstall(bare)
    assert bare.execute("SELECT to_regnamespace('outbox')").fetchone() == (None,)


def test_a_part_that_no_service_uses_is_dropped(bare: psycopg.Connection[Any], service: Service) -> None:
    service.has(SECOND)
    install(bare)
    bare.execute("INSERT INTO outbox.greeting (text) VALUES ('hello')")
    for work in (drop_part, rows_of_part):
        with pytest.raises(UsageError, match="this project has the part 'greeting'"):
            work(bare, "greeting")
    service.has(None)
    with pytest.raises(UsageError, match="no part 'farewell' has tables"):
        drop_part(bare, "farewell")
    before = catalogue.names(Executor(bare, "outbox"))
    assert rows_of_part(bare, "greeting") == {"greeting": 1}
    drop_part(bare, "greeting")
    assert recorded(bare) == []
    dropped = before - catalogue.names(Executor(bare, "outbox"))
    assert dropped >= OBJECTS | {"tongue"} and "commit_log" not in dropped
    uninstall(bare)


# -- services with different parts -------------------------------------------------------------------------


def lacks(connection: psycopg.Connection[Any]) -> list[tuple[Any, ...]]:
    return connection.execute("SELECT stands_in, lacks FROM outbox.leader_lease").fetchall()


def missing(connection: psycopg.Connection[Any]) -> list[Any]:
    found = survey(Executor(connection, "outbox")).verdict.conditions
    return [fact["part"] for one in found if one.name == "part_missing" for fact in one.evidence]


def test_a_process_without_the_part_leads_only_while_none_with_it_does(
    bare: psycopg.Connection[Any], service: Service
) -> None:
    """The part is installed while the process without it leads."""
    without = LeaderLease("outbox", uuid4(), term_seconds=0.001)
    assert without.acquire_or_renew(bare) == 0.0
    assert lacks(bare) == [(False, [])]
    service.has(FIRST, leads=True)
    install(bare)
    having = LeaderLease("outbox", uuid4(), term_seconds=60)
    another = LeaderLease("outbox", uuid4())
    service.has(None)
    assert without.acquire_or_renew(bare) == 0.0
    assert lacks(bare) == [(False, ["greeting"])]
    bare.execute("UPDATE outbox.leader_lease SET expires_at = now() + interval '1 hour'")
    assert missing(bare) == ["greeting"]
    assert having.acquire_or_renew(bare) == 0.0
    assert lacks(bare) == [(False, [])]
    assert missing(bare) == []
    assert without.acquire_or_renew(bare) > 0.0 and another.acquire_or_renew(bare) > 0.0
    having.release(bare)
    assert without.acquire_or_renew(bare) == 0.0


def test_two_services_with_different_parts_share_a_broker(bare: psycopg.Connection[Any], service: Service) -> None:
    """The messages of each are sequenced while the other is away, and the leader's work is done by the one that can."""
    Greeting.looks.clear()
    database, often = BrokerDatabase(bare.info.dsn), LeaderSettings(lease_term_seconds=0.3)
    service.has(FIRST, leads=True)
    install(bare)
    service.has(None)
    with process(database, often):
        eventually(lambda: lacks(bare) == [(False, ["greeting"])])
        assert Greeting.looks == []
        service.has(FIRST, leads=True)
        with process(database, often):
            eventually(lambda: Greeting.looks)
            assert lacks(bare) == [(False, [])]
            service.has(None)
        began = time.monotonic()
        eventually(lambda: lacks(bare) == [(False, ["greeting"])])
        assert max(Greeting.looks) <= began
