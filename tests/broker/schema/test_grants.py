"""The four roles of the broker's schema: each login does what its role may, and nothing else."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from outbox import hooks
from outbox.broker.database.connection import BrokerConnection, BrokerDatabase
from outbox.broker.database.executor import Executor
from outbox.broker.log.topics import declare_topics
from outbox.broker.operations import summary
from outbox.broker.operations.conditions import Condition, Severity
from outbox.broker.operations.diagnosis import diagnose
from outbox.broker.operations.rules import survey
from outbox.broker.postgres import PostgresBroker
from outbox.broker.schema import grants
from outbox.broker.schema.grants import Logins, Role
from outbox.broker.schema.install import SCHEMA_VERSION, check_schema, install
from outbox.errors import ConfigurationError, OutboxError, SendFailed
from outbox.topic import Topic
from outbox.transaction import Decision, EndStatus
from tests.broker.schema import versions
from tests.broker.support import end, half, message, new_sequencer, process, queued_ids
from tests.support import eventually


@dataclass
class Granted:
    """A broker with its roles, and one login for each of them."""

    database: BrokerDatabase
    logins: dict[Role, str]

    def as_role(self, role: Role) -> BrokerDatabase:
        return BrokerDatabase(make_conninfo(self.database.conninfo, user=self.logins[role]))


@pytest.fixture
def granted(database: BrokerDatabase, connection: BrokerConnection) -> Iterator[Granted]:
    suffix = conninfo_to_dict(database.conninfo)["dbname"]
    logins = {role: f"{role}_{suffix}" for role in Role}
    for login in logins.values():
        connection.execute(sql.SQL("CREATE ROLE {} LOGIN").format(sql.Identifier(login)))
    run = Executor(connection, "outbox")
    members = Logins({role: [login] for role, login in logins.items()}, producer_group="shop")
    statements = grants.plan(run, members)
    for statement in statements:
        connection.execute(statement.encode())
    yield Granted(database, logins)
    connection.execute("REASSIGN OWNED BY outbox_own TO CURRENT_USER")
    for name in (*logins.values(), *(grants.role_name("outbox", role) for role in Role)):
        connection.execute(sql.SQL("DROP OWNED BY {}").format(sql.Identifier(name)))
        connection.execute(sql.SQL("DROP ROLE {}").format(sql.Identifier(name)))


@pytest.fixture
def publisher(granted: Granted) -> Iterator[PostgresBroker]:
    broker = PostgresBroker(granted.as_role(Role.PUBLISH))
    yield broker
    broker.close()


@contextlib.contextmanager
def session(database: BrokerDatabase) -> Iterator[psycopg.Connection[Any]]:
    with contextlib.closing(database.open(name="session")) as connection:
        yield connection


def test_a_publisher_publishes_ends_and_sends_again(
    granted: Granted, publisher: PostgresBroker, connection: BrokerConnection
) -> None:
    one, several = message(), [message(), message()]
    assert publisher.send([one]) == publisher.send([one])
    assert len(publisher.send(several)) == 2
    single, batch, lost = half(), half(message(), message()), half()
    for transaction in (single, batch, lost):
        publisher.send_half(transaction)
        assert publisher.send_half(transaction)[0].transaction_id == transaction.transaction_id
    assert publisher.end([end(single.transaction_id)]) == [EndStatus.APPLIED]
    assert publisher.end([end(single.transaction_id, Decision.ROLLBACK)]) == [EndStatus.CONTRADICTED]
    publisher.end_one_way(end(batch.transaction_id))
    publisher.hint_one_way(lost.transaction_id)
    assert publisher.flush(within_seconds=10)
    sequencer = new_sequencer(granted.database)
    sequencer.run_once(connection)
    wanted = [one, *several, *single.messages, *batch.messages]
    assert sorted(queued_ids(connection)) == sorted(each.message_id for each in wanted)
    hinted = connection.execute("SELECT transaction_id, due_at <= now() FROM outbox.pending_check").fetchall()
    assert hinted == [(lost.transaction_id, True)]


FORBIDDEN = (
    "SELECT body FROM outbox.commit_log",
    "SELECT message_id FROM outbox.commit_log",
    "SELECT * FROM outbox.message_v1",
    "SELECT * FROM outbox.dead_letter_v1",
    "SELECT * FROM outbox.op_log",
    "INSERT INTO outbox.op_log (transaction_id, decision, decided_by, log_ids)"
    " VALUES (gen_random_uuid(), 'C', 'P', '{1}')",
    "UPDATE outbox.op_log SET decision = 'R'",
    "INSERT INTO outbox.commit_log (born_at, transaction_id, message_id, topic_id, half, key, tag, content_type, body)"
    " VALUES (now(), gen_random_uuid(), gen_random_uuid(), 1, true, '', '', '', '')",
    "UPDATE outbox.pending_check SET due_at = now()",
    "INSERT INTO outbox.publisher VALUES (current_user, 'billing')",
    "UPDATE outbox.topic SET over_limit = NULL",
    "UPDATE outbox.incident SET detail = ''",
    "SELECT detail FROM outbox.incident",
    "DELETE FROM outbox.scheduled",
    "SELECT outbox.may_publish_for('shop')",
    "TRUNCATE outbox.commit_log",
    "DROP TABLE outbox.op_log",
)


def test_a_publisher_reads_no_body_and_decides_nothing_by_itself(granted: Granted, publisher: PostgresBroker) -> None:
    publisher.send([message()])
    allowed = []
    with session(granted.as_role(Role.PUBLISH)) as opened:
        for statement in FORBIDDEN:
            try:
                opened.execute(statement.encode())
            except psycopg.errors.InsufficientPrivilege:
                continue
            allowed.append(statement)
    assert allowed == []


def test_a_publisher_decides_only_for_its_own_producer_group(
    granted: Granted, broker: PostgresBroker, publisher: PostgresBroker, connection: BrokerConnection
) -> None:
    other = half(group="billing")
    broker.send_half(other)
    assert publisher.end([end(other.transaction_id, group="billing")]) == [EndStatus.REFUSED]
    publisher.end_one_way(end(other.transaction_id, group="billing"))
    assert publisher.flush(within_seconds=10)
    for forged in (half(group="billing"), half(message(), message(), group="billing")):
        with pytest.raises((ConfigurationError, SendFailed), match="may not publish for producer group 'billing'"):
            publisher.send_half(forged)
    assert connection.execute("SELECT count(*) FROM outbox.op_log").fetchall() == [(0,)]
    assert connection.execute("SELECT message_id FROM outbox.commit_log").fetchall() == [(other.transaction_id,)]
    details = connection.execute("SELECT kind, detail FROM outbox.incident").fetchall()
    refusal = (
        f"PRODUCER of group 'billing' reported COMMIT, refused: role {granted.logins[Role.PUBLISH]} may not decide"
    )
    assert details == [("refused", f"{refusal} for this group")] * 2


# With its message first, as half messages, and as messages that are all new.
FORGED = """
WITH given AS (SELECT CASE WHEN %(first)s THEN ARRAY[%(id)s::uuid] ELSE '{}' END
                      || ARRAY[gen_random_uuid(), gen_random_uuid()] AS ids)
SELECT outbox.append_batch(
    %(id)s, ids, array_fill(now(), ARRAY[cardinality(ids)]), '{}', '{}', '{}',
    array_fill(''::text, ARRAY[cardinality(ids)]), '{}', '{}', '{}',
    array_fill(''::bytea, ARRAY[cardinality(ids)]), '{}', %(topic)s, '', '',
    CASE WHEN %(half)s THEN 'shop' ELSE '' END, true, %(half)s, 60, NULL, %(all_new)s)
FROM given
"""


def test_a_publisher_adds_no_message_to_the_transaction_of_another_group(
    granted: Granted, broker: PostgresBroker, connection: BrokerConnection
) -> None:
    """A row of op_log with the id of the transaction would decide it, without its messages."""
    other = half(group="billing")
    broker.send_half(other)
    [(topic_id,)] = connection.execute("SELECT topic_id FROM outbox.topic WHERE name = 'orders'").fetchall()
    with session(granted.as_role(Role.PUBLISH)) as opened:
        for given in itertools.product([False, True], repeat=3):
            forged = dict(zip(("first", "half", "all_new"), given, strict=True))
            with pytest.raises(psycopg.errors.UniqueViolation):
                opened.execute(FORGED, {**forged, "id": other.transaction_id, "topic": topic_id})
    assert connection.execute("SELECT count(*) FROM outbox.op_log").fetchall() == [(0,)]
    assert connection.execute("SELECT message_id FROM outbox.commit_log").fetchall() == [(other.transaction_id,)]


def test_the_role_of_the_session_counts_not_the_one_that_logged_in(
    granted: Granted, broker: PostgresBroker, connection: BrokerConnection
) -> None:
    """OPTIONS['assume_role'] and SET ROLE; and a role that is a member of the one in the table."""
    login = sql.Identifier(granted.logins[Role.PUBLISH])
    member = sql.Identifier(f"member_{granted.logins[Role.PUBLISH]}")
    connection.execute(sql.SQL("CREATE ROLE {} LOGIN IN ROLE {}").format(member, login))
    try:
        ended = half()
        broker.send_half(ended)
        connection.execute(sql.SQL("SET ROLE {}").format(login))
        with pytest.raises(psycopg.errors.InsufficientPrivilege, match="may not publish for producer group 'billing'"):
            connection.execute(
                "SELECT outbox.append_one(gen_random_uuid(), 1, 0, '', '', '', '', NULL, now(), NULL, NULL,"
                " 'billing', true, true, 60, NULL)"
            )
        connection.execute(sql.SQL("SET ROLE {}").format(member))
        outcome = connection.execute("SELECT outbox.record_end(%s, 'C', 'shop')", [ended.transaction_id]).fetchall()
        assert outcome == [("applied",)]
    finally:
        connection.execute("RESET ROLE")
        connection.execute(sql.SQL("DROP ROLE {}").format(member))


def test_a_worker_leads_and_sequences_and_a_watcher_only_reads(
    granted: Granted, publisher: PostgresBroker, connection: BrokerConnection
) -> None:
    sent = publisher.send([message(), message()])
    worker, watcher = granted.as_role(Role.WORK), granted.as_role(Role.WATCH)
    with process(worker):
        eventually(lambda: len(queued_ids(connection)) == len(sent))
        eventually(lambda: connection.execute("SELECT 1 FROM outbox.summary").fetchone() is not None)
    assert summary.run_once(worker) >= 0
    with session(watcher) as opened:
        run = Executor(opened, "outbox")
        assert survey(run).state is not None
        assert opened.execute("SELECT count(*) FROM outbox.message_v1").fetchall() == [(2,)]
        for statement in ("DELETE FROM outbox.commit_log", "SELECT outbox.make_checks_due('{}', 1)"):
            with pytest.raises(psycopg.errors.InsufficientPrivilege):
                opened.execute(statement.encode())
    for role in (Role.WATCH, Role.PUBLISH):
        with session(granted.as_role(role)) as opened, pytest.raises(psycopg.errors.InsufficientPrivilege):
            new_sequencer(granted.as_role(role)).run_once(opened)
    with contextlib.closing(PostgresBroker(watcher)) as broker, pytest.raises(OutboxError, match="permission denied"):
        broker.send([message()])


def test_the_doctor_of_a_watcher_does_not_look_at_the_connection_of_workers(granted: Granted) -> None:
    """Its login never listens, and its machine need not reach the server itself."""
    for role, severity in ((Role.WATCH, None), (Role.WORK, Severity.CRITICAL)):
        login = granted.as_role(role)
        away = BrokerDatabase(login.conninfo, listen_conninfo="host=localhost port=1 dbname=nowhere")
        with session(login) as opened:
            found = {one.name: one.severity for one in diagnose(Executor(opened, "outbox"), away)}
        assert [found.get(name) for name in ("pooler", "grants of LISTEN_URL")] == [severity] * 2


def _grants_of(database: BrokerDatabase) -> Condition:
    with session(database) as opened:
        return next(one for one in diagnose(Executor(opened, "outbox"), database) if one.name == "grants")


def test_the_doctor_gives_a_missing_right_to_the_role_and_no_other_right(
    granted: Granted, connection: BrokerConnection
) -> None:
    """Rights of a login on all tables would undo the roles: a worker could name its own producer groups."""
    for role in (Role.WORK, Role.WATCH):
        login, name = granted.as_role(role), grants.role_name("outbox", role)
        connection.execute(f"REVOKE SELECT ON outbox.dead_letter FROM {name}".encode())
        found = _grants_of(login)
        assert found.severity is Severity.CRITICAL and found.meaning.endswith("SELECT on dead_letter")
        statement = f'GRANT SELECT ON outbox.dead_letter TO "{name}";'
        assert found.next_step == f"Execute as the owner of the tables: {statement}"
        connection.execute(statement.encode())
        assert _grants_of(login).severity is Severity.OK
    connection.execute("ALTER TABLE outbox.dead_letter OWNER TO CURRENT_USER")
    found = _grants_of(granted.as_role(Role.OWN))
    assert found.next_step.endswith(': ALTER TABLE outbox.dead_letter OWNER TO "outbox_own";')


def test_the_doctor_advises_a_login_without_a_role_to_become_a_member(
    granted: Granted, connection: BrokerConnection
) -> None:
    name = f"bare_{conninfo_to_dict(granted.database.conninfo)['dbname']}"
    login = BrokerDatabase(make_conninfo(granted.database.conninfo, user=name))
    connection.execute(f'CREATE ROLE "{name}" LOGIN'.encode())
    try:
        found = _grants_of(login)
        statement = f'GRANT "outbox_work" TO {name};'
        assert found.next_step == f"If this is the login of a worker, execute as an administrator: {statement}"
        connection.execute(statement.encode())
        assert _grants_of(login).severity is Severity.OK
    finally:
        connection.execute(f'DROP ROLE "{name}"'.encode())


def test_a_process_without_a_right_logs_how_to_find_the_grants(
    granted: Granted, caplog: pytest.LogCaptureFixture
) -> None:
    with process(granted.as_role(Role.WATCH)):
        eventually(lambda: "is interrupted" in caplog.text)
    [line, *_] = [one for one in caplog.messages if "is interrupted" in one]
    assert "permission denied" in line and "`manage.py outbox_doctor --for work`" in line


def test_an_upgrade_by_an_owner_gives_the_rights_on_what_is_new(
    granted: Granted, connection: BrokerConnection, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A new table that the worker may not use stopped consumption."""
    versions.become_next(tmp_path / "schema", monkeypatch)
    connection.execute("REVOKE EXECUTE ON FUNCTION outbox.append_one FROM outbox_publish")
    with session(granted.as_role(Role.OWN)) as opened:
        assert install(opened, "outbox") == versions.NEXT
        declare_topics(Executor(opened, "outbox"), [Topic(name="more")])
    owners = connection.execute(
        "SELECT DISTINCT pg_get_userbyid(relowner)::text FROM pg_class WHERE relnamespace = 'outbox'::regnamespace"
    ).fetchall()
    assert owners == [("outbox_own",)]
    for role in Role:
        with session(granted.as_role(role)) as opened:
            assert grants.missing_rights(Executor(opened, "outbox"), role) == []
    with session(granted.as_role(Role.PUBLISH)) as opened:
        assert grants.missing_rights(Executor(opened, "outbox"), Role.PUBLISH, producer_group="shop") == []
        assert grants.excess_rights(Executor(opened, "outbox")) == []


def test_the_tables_of_a_part_are_for_workers_and_watchers(
    granted: Granted, connection: BrokerConnection, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "granted_greeting").mkdir()
    (tmp_path / "granted_greeting" / "current.sql").write_text(
        "CREATE TABLE greeting (greeting_id integer GENERATED ALWAYS AS IDENTITY, text text)"
    )
    monkeypatch.setitem(hooks.schemas, "greeting", "granted_greeting")
    with session(granted.as_role(Role.OWN)) as opened:
        install(opened, "outbox")
    for role in Role:
        with session(granted.as_role(role)) as opened:
            run = Executor(opened, "outbox")
            assert grants.missing_rights(run, role) == []
            allowed = {
                word
                for word in ("SELECT", "INSERT", "UPDATE", "DELETE")
                if run.connection.execute("SELECT has_table_privilege('outbox.greeting', %s)", [word]).fetchone()
                == (True,)
            }
            everything = {"SELECT", "INSERT", "UPDATE", "DELETE"}
            rights = {Role.PUBLISH: set[str](), Role.WATCH: {"SELECT"}}
            assert allowed == rights.get(role, everything), role
            # A publisher sees whether the tables of its parts are there, and a worker records no part.
            assert check_schema(opened, "outbox") == SCHEMA_VERSION
    with session(granted.as_role(Role.WORK)) as opened, pytest.raises(psycopg.errors.InsufficientPrivilege):
        opened.execute("UPDATE outbox.schema_version SET leads = true")


@pytest.mark.parametrize("role", Role)
def test_each_missing_right_is_named_with_the_statement_that_grants_it(
    role: Role, database: BrokerDatabase, connection: BrokerConnection, request: pytest.FixtureRequest
) -> None:
    name = f"bare_{role}_{conninfo_to_dict(database.conninfo)['dbname']}"
    login = sql.Identifier(name)
    connection.execute(sql.SQL("CREATE ROLE {} LOGIN").format(login))
    try:
        with session(BrokerDatabase(make_conninfo(database.conninfo, user=name))) as opened:
            run = Executor(opened, "outbox")
            [first] = grants.missing_rights(run, role)
            assert (first.subject, first.right) == ("schema outbox", "USAGE")
            connection.execute(first.remedy.encode())
            named = grants.missing_rights(run, role)
            assert len(named) > 10
            while missing := grants.missing_rights(run, role, producer_group="shop"):
                for one in missing:
                    connection.execute(one.remedy.encode())
                named += missing
            assert bool([one for one in named if one.subject == "producer group 'shop'"]) == (role is Role.PUBLISH)
            assert bool(grants.excess_rights(run)) == (role in (Role.WORK, Role.WATCH, Role.OWN))
    finally:
        connection.execute(sql.SQL("REASSIGN OWNED BY {} TO CURRENT_USER").format(login))
        connection.execute(sql.SQL("DROP OWNED BY {}").format(login))
        connection.execute(sql.SQL("DROP ROLE {}").format(login))


def test_an_installer_without_superuser_makes_the_roles_and_upgrades(
    new_database: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a managed server: a role with CREATEROLE, and CREATE on its database."""
    url = new_database()
    name = conninfo_to_dict(url)["dbname"]
    deploy, web = f"deploy_{name}", f"web_{name}"
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(sql.SQL("CREATE ROLE {} LOGIN CREATEROLE").format(sql.Identifier(deploy)))
        create = sql.SQL("GRANT CREATE ON DATABASE {} TO {}").format(sql.Identifier(str(name)), sql.Identifier(deploy))
        connection.execute(create)
        try:
            with psycopg.connect(make_conninfo(url, user=deploy), autocommit=True) as as_deploy:
                install(as_deploy, "outbox")
                as_deploy.execute(sql.SQL("CREATE ROLE {} LOGIN").format(sql.Identifier(web)))
                run = Executor(as_deploy, "outbox")
                members = Logins({Role.PUBLISH: [web]}, producer_group="shop")
                with as_deploy.transaction():
                    for statement in grants.plan(run, members):
                        if not statement.startswith("--"):
                            as_deploy.execute(statement.encode())
                later = grants.plan(run, members)
                assert [one for one in later if one.startswith(("DO", "ALTER"))] == []
                versions.become_next(tmp_path / "schema", monkeypatch)
                assert install(as_deploy, "outbox") == versions.NEXT
            with session(BrokerDatabase(make_conninfo(url, user=web))) as opened:
                assert grants.missing_rights(Executor(opened, "outbox"), Role.PUBLISH, producer_group="shop") == []
        finally:
            made = [grants.role_name("outbox", role) for role in Role]
            for one in (*made, web, deploy):
                with contextlib.suppress(psycopg.errors.UndefinedObject):
                    connection.execute(sql.SQL("REASSIGN OWNED BY {} TO CURRENT_USER").format(sql.Identifier(one)))
                    connection.execute(sql.SQL("DROP OWNED BY {} CASCADE").format(sql.Identifier(one)))
                    connection.execute(sql.SQL("DROP ROLE {}").format(sql.Identifier(one)))
