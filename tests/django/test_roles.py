"""What each of the four roles may do: docs/operations/roles.md has the table that these tests make."""

from __future__ import annotations

import contextlib
import json
import re
import shlex
import tempfile
from collections.abc import Callable, Iterator, Sequence
from io import StringIO
from pathlib import Path
from typing import Any, Final
from uuid import uuid4

import psycopg
import pytest
from django.contrib.auth.models import User
from django.core.management import CommandError, call_command
from django.db import connections, transaction
from django.db.utils import ProgrammingError
from django.test import Client
from psycopg.conninfo import make_conninfo

from outbox import Delivery
from outbox.broker.schema import grants, install
from outbox.broker.schema.grants import Role
from outbox.broker.schema.install import SCHEMA_VERSION
from outbox.contrib.django import publish, publish_many, subscriber, transactional_message
from outbox.contrib.django.catalogue import LISTINGS
from outbox.contrib.django.database import aliases
from outbox.contrib.django.database.aliases import alias_conninfo
from outbox.contrib.django.engine import broker as broker_access
from outbox.contrib.django.engine.broker import flush, get_broker
from outbox.contrib.django.ledger.pruning import run_prune
from outbox.contrib.django.operations.granting import grant, renew
from outbox.contrib.django.publishing.checkback import run_check_back
from outbox.contrib.django.settings.conf import get_settings
from outbox.errors import OutboxError
from outbox.transaction import Decision, EndStatus, EndTransaction
from tests.django.operators import ALL, client_of, command_of, make_user
from tests.django.shop.models import Effect, Order
from tests.django.state import execute
from tests.django.support import consume, ended
from tests.django.test_poolers import behind
from tests.part_apps import has
from tests.pooler import PROGRAM, VERSIONS
from tests.support import eventually

PAGE: Final = Path(__file__).resolve().parents[2] / "docs" / "operations" / "roles.md"
APPLICATION: Final = ("default", "other")
# The tables of the application itself, which `outbox_install --grants` does not touch.
OF_THE_SHOP: Final = """
SELECT quote_ident(relname) FROM pg_class
WHERE relnamespace = 'public'::regnamespace AND relkind IN ('r', 'p') AND relname NOT LIKE 'outbox%'
"""

OF_OUTBOX: Final = """
SELECT quote_ident(relname) FROM pg_class
WHERE relnamespace = 'public'::regnamespace AND relkind IN ('r', 'p') AND relname LIKE 'outbox%'
"""


class NotAllowed(Exception):
    """The operation was refused for want of a right."""


# -- the operations ----------------------------------------------------------------------------------


def _in_transaction() -> None:
    with transaction.atomic():
        Order.objects.create(number=uuid4().hex)
        publish("orders", {}, key="k")
    assert flush(within_seconds=10)


def _several() -> None:
    with transaction.atomic():
        publish_many("orders", [{}, {}])
    assert flush(within_seconds=10)


def _unique() -> None:
    from outbox.contrib.unique import Unique

    with transaction.atomic():
        publish("orders", {}, Unique(uuid4().hex, within=60))


def _decorated() -> None:
    @transactional_message("orders", body={})
    def order() -> None:
        Order.objects.create(number=uuid4().hex)

    order()
    assert flush(within_seconds=10)


def _broker(statement: str) -> list[tuple[Any, ...]]:
    with psycopg.connect(alias_conninfo(get_settings().broker), autocommit=True) as connection:
        cursor = connection.execute(statement.encode())
        return cursor.fetchall() if cursor.description else []


def _end_of_another_group() -> None:
    end = EndTransaction(transaction_id=uuid4(), decision=Decision.COMMIT, producer_group="billing")
    assert get_broker().end([end]) == [EndStatus.REFUSED]
    [(detail,)] = _as_owner("SELECT detail FROM outbox.incident ORDER BY incident_id DESC LIMIT 1")
    if "may not decide" in detail:
        raise NotAllowed(detail)


def _command(*arguments: str) -> Callable[[], None]:
    def call() -> None:
        out = StringIO()
        with contextlib.suppress(SystemExit):
            call_command(*arguments, stdout=out, stderr=out, no_color=True)
        # A command that reports conditions names the error as one of them.
        if "permission denied" in out.getvalue() or "was not examined" in out.getvalue():
            raise NotAllowed(out.getvalue())

    return call


def _upgrade() -> None:
    """Upgrade the tables to a next version, whose change leaves them as they are."""
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        change = Path(folder) / "next.sql"
        change.write_text("-- Locks: held\nALTER TABLE held SET (fillfactor = 100);\n")
        patch.setattr(install, "_CHANGES", {SCHEMA_VERSION + 1: change})
        patch.setattr(install, "SCHEMA_VERSION", SCHEMA_VERSION + 1)
        try:
            _command("outbox_install")()
        finally:
            _as_owner(f"UPDATE outbox.schema_version SET version = {SCHEMA_VERSION} WHERE name = 'core'")


def _consume() -> None:
    consume()


def _opened(address: str) -> None:
    """Open a page. On a busy machine it may run into its time limit, which is no refusal: then open it again."""

    def is_answered() -> bool:
        answer = _CLIENT[0].get(address)
        text = answer.content.decode()
        if "permission denied" in text or "lacks a right" in text:
            raise NotAllowed(text)
        seen.append(text)
        return answer.status_code == 200 and 'name="unreachable"} 2' not in text

    seen: list[str] = []
    eventually(is_answered, what=lambda: seen[-1])


def _asked(address: str) -> None:
    """The answer of a view, whatever it says about the state of the broker."""
    text = _CLIENT[0].get(address).content.decode()
    if "permission denied" in text or "lacks a right" in text:
        raise NotAllowed(text)


def _views() -> None:
    for view in ("message_v1", "delivery_v1", "dead_letter_v1", "topic_v1", "timed_out_v1", "group_v1", "offset_v1"):
        _broker(f"SELECT * FROM outbox.{view}")
    _broker("SELECT * FROM outbox.queue_entry_v1, outbox.check_v1, outbox.failure_v1")


OPERATIONS: Final[dict[str, Callable[[], Any]]] = {
    "`publish` in a transaction, and its end message": _in_transaction,
    "`publish` with `at_once=True`": lambda: publish("orders", {}, at_once=True),
    "`publish_many`": _several,
    "`publish` with `Unique`": _unique,
    "`@transactional_message`": _decorated,
    "`SELECT outbox.publish(…)`": lambda: _broker("SELECT outbox.publish('orders', '{}')"),
    "an end message for another producer group": _end_of_another_group,
    "read a body": lambda: _broker("SELECT body FROM outbox.commit_log"),
    "`INSERT INTO outbox.op_log` (decide by hand)": lambda: _broker(
        "INSERT INTO outbox.op_log (transaction_id, decision, decided_by, log_ids)"
        " VALUES (gen_random_uuid(), 'C', 'P', '{}')"
    ),
    "`recall`": lambda: get_broker().recall([uuid4()]),
    "consume, sequence, lead": _consume,
    "check-back": lambda: run_check_back(),
    "pruning": lambda: run_prune(),
    "the view `health/`": lambda: _asked("/outbox/health/"),
    "the view `status/`": lambda: _asked("/outbox/status/"),
    **({"the view `metrics/`": lambda: _opened("/outbox/metrics/")} if has("prometheus") else {}),
    **({"the operations page": lambda: _opened("/outbox/")} if has("console") else {}),
    "reconciliation: the broker's views": _views,
    "`outbox_status`": _command("outbox_status"),
    "`outbox_doctor` without `--for`": _command("outbox_doctor"),
    "`outbox_doctor --for publish`": _command("outbox_doctor", "--for", "publish"),
    "`outbox_audit`": _command("outbox_audit"),
    "`outbox_erase`": _command("outbox_erase", "orders", "--key", "k", "--reason", "a test", "--no-input"),
    "`outbox_message list`": _command("outbox_message", "list", "orders"),
    "`outbox_transaction list`": _command("outbox_transaction", "list"),
    "`outbox_transaction reject`": _command("outbox_transaction", "reject", "--no-input"),
    "`outbox_dead_letter list`": _command("outbox_dead_letter", "list"),
    "`outbox_group offsets`": _command("outbox_group", "offsets", "effects"),
    "`outbox_group pause`": _command("outbox_group", "pause", "effects"),
    "`outbox_topic list`": _command("outbox_topic", "list"),
    "`outbox_install` (an upgrade)": _upgrade,
    "change a table of the broker": lambda: _broker("ALTER TABLE outbox.held SET (fillfactor = 100)"),
}

# -- logins ------------------------------------------------------------------------------------------


def _as_owner(statement: str, alias: str = "") -> list[tuple[Any, ...]]:
    with psycopg.connect(_OWNERS[alias or get_settings().broker], autocommit=True) as connection:
        cursor = connection.execute(statement.encode())
        return cursor.fetchall() if cursor.description else []


_OWNERS: dict[str, str] = {}
_CLIENT: list[Client] = []


def _connect_as(user: str) -> None:
    """Let all aliases of PostgreSQL connect as this login."""
    flush(within_seconds=5)
    broker_access.reset_broker()
    for alias in ("default", "other", "broker"):
        connections[alias].close()
        for settings in (connections[alias].settings_dict, connections.settings[alias]):
            settings["USER"] = user


@pytest.fixture
def logins(path: str, databases: None, no_subscribers: None) -> Iterator[dict[Role, str]]:
    owner = connections["default"].settings_dict["USER"]
    _OWNERS.update({alias: alias_conninfo(alias) for alias in (*APPLICATION, "broker")})
    names = {role: f"outbox_test_{role}" for role in Role}
    try:
        _make(names)
        yield names
    finally:
        _connect_as(owner)
        User.objects.all().delete()
        _as_owner("UPDATE outbox.broker SET reject_transactional = false")
        _forget([*names.values()])


def _make(names: dict[Role, str]) -> None:
    """The logins with their rights, a subscribed group, and a user of the page."""
    _as_owner("; ".join(f"CREATE ROLE {name} LOGIN" for name in names.values()))
    everyone = ", ".join(names.values())
    tables = ", ".join(table for (table,) in _as_owner(OF_THE_SHOP, "default"))
    _as_owner(
        f"GRANT SELECT, INSERT, UPDATE, DELETE ON {tables} TO {everyone};"
        f" GRANT USAGE ON ALL SEQUENCES IN SCHEMA public TO {everyone}",
        "default",
    )
    # The login that runs `migrate` owns the application's tables.
    for alias in APPLICATION:
        owned = [table for (table,) in _as_owner(OF_OUTBOX, alias)]
        _as_owner("; ".join(f"ALTER TABLE {table} OWNER TO {names[Role.OWN]}" for table in owned), alias)
    grant(get_settings(), {role: [name] for role, name in names.items()})

    @subscriber("orders", group="effects")
    def effect(delivery: Delivery) -> None:
        Effect.objects.create(number=delivery.key)

    _consume()
    _CLIENT[:] = [client_of(make_user(*ALL))]


def _forget(names: Sequence[str]) -> None:
    """Drop these logins and the four roles, and leave the tables to the owner of the databases."""
    found = _as_owner("SELECT rolname::text FROM pg_roles")
    all_names = {*names, *(grants.role_name("outbox", role) for role in Role)}
    if made := ", ".join(name for (name,) in found if name in all_names):
        for alias in (*APPLICATION, "broker"):
            _as_owner(f"REASSIGN OWNED BY {made} TO CURRENT_USER; DROP OWNED BY {made}", alias)
        _as_owner(f"DROP ROLE {made}")


def _is_refusal(error: BaseException) -> bool:
    found: BaseException | None = error
    while found is not None:
        if isinstance(found, (psycopg.errors.InsufficientPrivilege, NotAllowed)):
            return True
        if re.search(r"permission denied|must be owner|lacks a right|may not publish", str(found)):
            return True
        found = found.__cause__ or found.__context__
    return False


def _is_allowed(operation: Callable[[], Any]) -> bool:
    try:
        operation()
    except (OutboxError, CommandError, ProgrammingError, psycopg.Error, NotAllowed) as error:
        if not _is_refusal(error):
            raise
        return False
    return True


def _table() -> list[list[str]]:
    [rows] = re.findall(r"^\| operation \|.*\n\|[-|]+\n((?:\|.*\n)+)", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    table = [[cell.strip() for cell in line.strip("|").split("|")] for line in rows.splitlines()]
    parts = {"`outbox_erase`": "erasure", "the operations page": "console", "the view `metrics/`": "prometheus"}
    return [row for row in table if row[0] not in parts or has(parts[row[0]])]


@pytest.mark.slow
@pytest.mark.parametrize("path", ["two_phase", pytest.param("atomic", marks=pytest.mark.slow)], indirect=True)
def test_the_table_of_the_page(logins: dict[Role, str]) -> None:
    """Each operation as each login; the same on both paths."""
    made: list[Sequence[str]] = []
    for name, operation in OPERATIONS.items():
        cells = [name]
        for role in Role:
            # Otherwise there would be nothing to do for the second role that may pause or reject.
            _as_owner("UPDATE outbox.broker SET reject_transactional = false")
            _as_owner("UPDATE outbox.consumer_group SET paused = false")
            _connect_as(logins[role])
            cells.append("yes" if _is_allowed(operation) else "no")
        made.append(cells)
    assert "\n".join(f"| {' | '.join(row)} |" for row in made) == "\n".join(
        f"| {' | '.join(row)} |" for row in _table()
    )


@pytest.mark.skipif(PROGRAM is None, reason="PgBouncer is not installed")
@pytest.mark.parametrize("path", ["atomic", pytest.param("two_phase", marks=pytest.mark.slow)], indirect=True)
def test_the_roles_share_the_work_behind_a_pooler(
    logins: dict[Role, str], server_url: str, outbox_settings: Callable[..., None]
) -> None:
    """A web process publishes, a worker handles, a reader looks; each has the rights of its own login and no others."""
    outbox_settings(LISTEN_URL="")
    before = Effect.objects.count()
    with behind(server_url, VERSIONS["old"], size=2, logins=logins.values()):
        for turn in range(2):
            _connect_as(logins[Role.PUBLISH])
            _in_transaction()
            assert not _is_allowed(OPERATIONS["read a body"])
            assert not _is_allowed(_consume)
            _connect_as(logins[Role.WATCH])
            assert _is_allowed(OPERATIONS["`outbox_status`"])
            assert not _is_allowed(_in_transaction)
            _connect_as(logins[Role.WORK])
            _consume()
            assert Effect.objects.count() == before + turn + 1
            assert not _is_allowed(OPERATIONS["change a table of the broker"])
            _connect_as(logins[Role.OWN])
            _upgrade()
        for role in Role:
            _connect_as(logins[role])
            assert [one for one in _examined(role) if one["severity"] != "ok"] == []


@pytest.mark.parametrize("path", ["atomic", pytest.param("two_phase", marks=pytest.mark.slow)], indirect=True)
def test_the_doctor_finds_the_rights_of_each_role_complete(
    logins: dict[Role, str], outbox_settings: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    for role in Role:
        _connect_as(logins[role])
        found = _examined(role)
        subjects = {one["name"] for one in found}
        assert {f"rights to {role}", f"rights to {role} on 'default'", f"rights to {role} on 'other'"} <= subjects
        assert [one for one in found if one["severity"] != "ok"] == []
    _connect_as(logins[Role.WATCH])
    lacking = {one["name"]: one["next_step"] for one in _examined("work")}
    assert 'GRANT INSERT ON outbox.commit_log TO "outbox_test_watch";' in lacking["rights to work"]
    assert 'GRANT DELETE ON outbox_inbox TO "outbox_test_watch";' in lacking["rights to work on 'default'"]
    _connect_as(logins[Role.WORK])
    _as_owner("REVOKE DELETE ON outbox_inbox FROM outbox_work", "default")
    # A run of tests does not use LISTEN_URL, which names the database of the settings.
    monkeypatch.setattr(aliases, "running_tests", lambda: False)
    outbox_settings(LISTEN_URL=make_conninfo(alias_conninfo(get_settings().broker), user=logins[Role.WATCH]))
    named = {one["name"]: one for one in _examined("work")}
    assert 'GRANT DELETE ON outbox_inbox TO "outbox_work";' in named["rights to work on 'default'"]["next_step"]
    assert named["grants of LISTEN_URL"]["severity"] == "critical"


@pytest.mark.parametrize("path", ["atomic", pytest.param("two_phase", marks=pytest.mark.slow)], indirect=True)
def test_the_doctor_warns_of_a_publisher_with_rights_on_tables_of_the_application(logins: dict[Role, str]) -> None:
    """Such rights come with `GRANT … ON ALL TABLES`. The printed statements take them back, and no others."""
    name = logins[Role.PUBLISH]
    for table in ("outbox_ledger", "outbox_inbox", "outbox_key_lock"):
        _as_owner(f"GRANT SELECT, INSERT, UPDATE, DELETE ON {table} TO {name}", "default")
    _connect_as(name)
    [found] = [one for one in _examined("publish") if one["severity"] != "ok"]
    assert (found["name"], found["severity"]) == ("rights beyond publish on 'default'", "warning")
    assert "UPDATE, DELETE on outbox_ledger" in found["meaning"] and "SELECT" in found["meaning"]
    for statement in found["next_step"].partition(": ")[2].rstrip(";").split("; "):
        _as_owner(statement, "default")
    assert [one for one in _examined("publish") if one["severity"] != "ok"] == []
    _in_transaction()


def _examined(*role: str) -> list[dict[str, Any]]:
    """The findings of the doctor, for this role or without `--for`."""
    _, said = ended("outbox_doctor", *(["--for", *role] if role else []), "--json")
    found: list[dict[str, Any]] = json.loads(said)
    return found


@pytest.mark.parametrize("path", ["atomic", pytest.param("two_phase", marks=pytest.mark.slow)], indirect=True)
def test_the_doctor_does_not_offer_the_rights_of_a_worker_to_a_publisher_or_a_reader(logins: dict[Role, str]) -> None:
    _connect_as(logins[Role.PUBLISH])
    found = {one["name"]: one for one in _examined()}
    assert "GRANT" not in str(found)
    assert found["rights to publish"]["severity"] == "ok"
    assert [name for name, one in found.items() if one["severity"] != "ok"] == ["broker"]
    assert found["broker"]["severity"] == "warning" and "login of a worker" in found["broker"]["next_step"]
    _connect_as(logins[Role.WATCH])
    found = {one["name"]: one for one in _examined()}
    assert found["grants"]["severity"] == "ok" and "to watch" in found["grants"]["meaning"]


@pytest.mark.parametrize("path", ["atomic", pytest.param("two_phase", marks=pytest.mark.slow)], indirect=True)
def test_an_upgrade_uses_the_login_of_the_alias_also_if_listen_url_has_that_of_a_worker(
    logins: dict[Role, str], outbox_settings: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    # A run of tests does not use LISTEN_URL, which names the database of the settings.
    monkeypatch.setattr(aliases, "running_tests", lambda: False)
    outbox_settings(LISTEN_URL=make_conninfo(alias_conninfo(get_settings().broker), user=logins[Role.WORK]))
    _connect_as(logins[Role.OWN])
    _upgrade()
    _connect_as(logins[Role.WATCH])
    with pytest.raises(CommandError, match="were not changed"):
        _upgrade()


@pytest.mark.parametrize("path", ["atomic", pytest.param("two_phase", marks=pytest.mark.slow)], indirect=True)
def test_a_login_without_the_right_is_told_so_and_not_that_the_database_is_away(
    logins: dict[Role, str], caplog: pytest.LogCaptureFixture
) -> None:  # fmt: skip
    _connect_as(logins[Role.PUBLISH])
    with pytest.raises(CommandError, match="lacks a right"):
        call_command("outbox_status", "--probe")
    for view in ("health", "status", *(["metrics"] if has("prometheus") else [])):
        answer = _CLIENT[0].get(f"/outbox/{view}/")
        assert answer.status_code == 503 and "lacks a right" in answer.content.decode()
    # A load balancer takes the site out of service, and has no account to read why.
    caplog.clear()
    assert Client().get("/outbox/health/").json() == {"healthy": False}
    assert "health/ answers 503" in caplog.text and "lacks a right" in caplog.text
    if has("console"):
        assert "The login of this process lacks a right" in _CLIENT[0].get("/outbox/").content.decode()
    _connect_as(logins[Role.WATCH])
    with pytest.raises(CommandError, match="If a right is missing, use the login of a worker"):
        call_command("outbox_group", "pause", "effects", "--no-input")
    if has("console"):
        form = {"group": "effects", "confirmed": "yes", "why": "a test"}
        page = _CLIENT[0].post("/outbox/act/pause/", form).content.decode()
        assert "The login of this process lacks a right" in page and "need the role work" in page


@pytest.mark.parametrize("path", ["two_phase"], indirect=True)
def test_a_reader_may_run_every_list_and_a_publisher_is_refused_by_a_sentence(logins: dict[Role, str]) -> None:
    commands = [command_of(one, "effects") for one in LISTINGS.values() if one.command]
    assert ["outbox_group", "offsets", "effects"] in commands
    _connect_as(logins[Role.WATCH])
    for command in commands:
        call_command(*command, stdout=StringIO())
    _connect_as(logins[Role.PUBLISH])
    for command in commands:
        if command != ["outbox_topic", "list"]:
            with pytest.raises(CommandError, match="lacks a right"):
                call_command(*command, stdout=StringIO())


@pytest.mark.parametrize("path", ["atomic", pytest.param("two_phase", marks=pytest.mark.slow)], indirect=True)
def test_a_migration_gives_the_rights_on_a_new_table(logins: dict[Role, str]) -> None:
    _as_owner("REVOKE ALL ON outbox_inbox, outbox_claim FROM outbox_work", "default")
    renew("default")
    renew("lite")
    held = _as_owner("SELECT has_table_privilege('outbox_work', 'outbox_inbox', 'DELETE')", "default")
    assert held == [(True,)]


@pytest.mark.parametrize("path", ["atomic", pytest.param("two_phase", marks=pytest.mark.slow)], indirect=True)
def test_a_second_call_changes_nothing_and_a_dry_run_prints_what_a_call_does(logins: dict[Role, str]) -> None:
    out = StringIO()
    call_command("outbox_install", "--grants", "--dry-run", "--work", "outbox_test_work", stdout=out, no_color=True)
    text = out.getvalue()
    assert "CREATE ROLE" not in text and "OWNER TO" not in text
    assert 'GRANT "outbox_work" TO "outbox_test_work";' in text
    before = _as_owner(
        "SELECT relname, relacl::text FROM pg_class WHERE relnamespace = 'outbox'::regnamespace ORDER BY 1"
    )
    call_command("outbox_install", "--grants", "--work", "outbox_test_work", stdout=out, no_color=True)
    after = _as_owner(
        "SELECT relname, relacl::text FROM pg_class WHERE relnamespace = 'outbox'::regnamespace ORDER BY 1"
    )
    assert before == after
    with pytest.raises(CommandError, match="need --grants"):
        call_command("outbox_install", "--work", "outbox_test_work")


# -- the pages -----------------------------------------------------------------------------------------

OF_THE_PAGE: Final = {
    Role.PUBLISH: "shop_web",
    Role.WORK: "shop_worker",
    Role.WATCH: "shop_metrics",
    Role.OWN: "shop_deploy",
}


def _blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


def _run(line: str) -> str:
    out = StringIO()
    with contextlib.suppress(SystemExit):
        call_command(*shlex.split(line, comments=True)[1:], stdout=out, stderr=out, no_color=True)
    return out.getvalue()


@pytest.fixture
def logins_of_the_page(databases: None, outbox_settings: Callable[..., None]) -> Iterator[None]:
    """A broker in a database of its own, and in the application's; the logins have no right yet."""
    _OWNERS.update({alias: alias_conninfo(alias) for alias in (*APPLICATION, "broker")})
    owner = connections["default"].settings_dict["USER"]
    try:
        for name in OF_THE_PAGE.values():
            _as_owner(f"CREATE ROLE {name} LOGIN")
        yield
    finally:
        _connect_as(owner)
        _forget([*OF_THE_PAGE.values()])


@pytest.mark.whole
def test_the_commands_of_the_page_make_roles_that_work(logins_of_the_page: None) -> None:
    owner, reader = connections["default"].settings_dict["USER"], make_user(*ALL)
    commands = [line for block in _blocks(PAGE, "sh") for line in block.splitlines() if line.startswith("manage.py")]
    [dry, real, *doctors] = commands
    printed = _run(dry)
    assert _as_owner("SELECT to_regrole('outbox_publish') IS NULL") == [(True,)]
    shown, rights_of_the_shop, rights_of_the_page, rights_on_sessions = _blocks(PAGE, "sql")
    assert [line for line in shown.splitlines() if line not in printed.splitlines()] == []
    assert _run(real) == printed
    for alias in APPLICATION:
        _as_owner(rights_of_the_shop, alias)
    _as_owner(rights_of_the_page, "default")
    # The project of the tests keeps sessions in cookies.
    _as_owner("CREATE TABLE django_session (session_key text)", "default")
    _as_owner(rights_on_sessions, "default")
    for role, command in zip((Role.PUBLISH, Role.WORK, Role.WATCH, Role.OWN), doctors, strict=True):
        _connect_as(OF_THE_PAGE[role])
        text = _run(command)
        assert "missing" not in text and "rights beyond publish" not in text, text
    _connect_as(OF_THE_PAGE[Role.PUBLISH])
    _in_transaction()
    with pytest.raises(ProgrammingError), connections["default"].cursor() as cursor:
        cursor.execute("SELECT * FROM outbox_inbox")
    # A later migration changes a table that the former owner has made, and adds one with a sequence of its own.
    _connect_as(OF_THE_PAGE[Role.OWN])
    with connections["default"].cursor() as cursor:
        cursor.execute("ALTER TABLE shop_order ADD COLUMN later integer")
        cursor.execute("CREATE TABLE shop_later (number serial)")
    try:
        _connect_as(OF_THE_PAGE[Role.PUBLISH])
        _in_transaction()
        execute("INSERT INTO shop_later DEFAULT VALUES")
    finally:
        _connect_as(OF_THE_PAGE[Role.OWN])
        with connections["default"].cursor() as cursor:
            cursor.execute("ALTER TABLE shop_order DROP COLUMN later")
            cursor.execute("DROP TABLE shop_later")
    _connect_as(OF_THE_PAGE[Role.WATCH])
    if has("console"):
        page = client_of(reader).get("/outbox/")
        assert page.status_code == 200 and "permission denied" not in page.content.decode()
    _connect_as(owner)
    reader.delete()
    _as_owner("DROP TABLE django_session", "default")


def test_the_commands_of_the_page_about_limits_run(databases: None) -> None:
    [block] = _blocks(PAGE.with_name("sizing.md"), "sh")
    said = [_run(line) for line in block.splitlines()]
    assert len(said) == 2 and all(said)
