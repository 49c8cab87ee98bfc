"""No statement of a page or an action waits for long: each is tried against a lock that another session holds."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import psycopg
import pytest
from django.test import Client

from outbox.contrib.django.database.aliases import alias_conninfo
from outbox.contrib.django.models import OperatorAction
from tests.django.broker_world import World
from tests.django.console.test_settling import lost_end
from tests.django.operators import bury
from tests.support import eventually

pytestmark = pytest.mark.usefixtures("no_subscribers")

PAGES = (
    *("undecided/", "dead-letters/", "dead-letters/list/", "waiting/", "messages/", "groups/", "topics/", "incidents/"),
    *("groups/one/?name=mail", "topics/one/?name=orders"),
)


@contextmanager
def held(world: World, statement: str, *parameters: object, alias: str = "broker") -> Iterator[None]:
    """Another session's transaction holds the locks of a statement."""
    with psycopg.connect(alias_conninfo(alias), application_name="holder") as holder:
        holder.execute(statement.encode(), parameters or None)
        yield
        holder.rollback()


def waiting(world: World) -> int:
    """How many sessions of this database wait for a lock."""
    [(count,)] = world.sql(
        "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
    )
    return int(count)


@pytest.fixture
def dead(world: World) -> World:
    world.subscribe("mail")
    world.publish(2)
    for key in ("k0", "k1"):
        bury(world, "mail", key, "TimeoutError: no answer")
    return world


@pytest.mark.parametrize("pages", [PAGES[:3], pytest.param(PAGES[3:], marks=pytest.mark.slow)])
def test_a_page_names_a_lock_that_it_waits_for(dead: World, operator: Client, pages: tuple[str, ...]) -> None:
    [tables] = dead.sql("SELECT string_agg(oid::regclass::text, ', ') FROM pg_class"
                        " WHERE relnamespace = 'outbox'::regnamespace AND relkind = 'r'")  # fmt: skip
    with held(dead, f"LOCK TABLE {tables[0]}"):
        for page in pages:
            answer = operator.get(f"/outbox/{page}")
            assert answer.status_code == 503 and b"Another session holds a lock" in answer.content, page
        assert b"lock_held" in operator.get("/outbox/").content
        assert waiting(dead) == 0


def test_a_plan_names_a_lock_that_it_waits_for(dead: World, operator: Client) -> None:
    given = {"group": "mail", "error_type": "TimeoutError"}
    with held(dead, "SELECT FROM outbox.dead_letter FOR UPDATE"):
        shown = operator.post("/outbox/act/replay/", given)
        assert shown.status_code == 503 and b"Another session holds a lock" in shown.content
        assert waiting(dead) == 0
    assert b"Deliver 2 dead letters again" in operator.post("/outbox/act/replay/", given).content


def test_a_plan_does_not_wait_for_the_ledger(world: World, operator: Client) -> None:
    given = {"id": str(lost_end(world)), "decision": "commit"}
    with held(world, "LOCK TABLE outbox_ledger", alias="default"):
        shown = operator.post("/outbox/act/decide/", given)
    assert shown.status_code == 200 and b"lock timeout" in shown.content, "the ledger could not be read"


def test_an_action_that_met_a_lock_has_an_audit_row(dead: World, operator: Client) -> None:
    confirmed = {"group": "mail", "confirmed": "yes", "why": "a test"}
    with held(dead, "SELECT FROM outbox.consumer_group FOR UPDATE"):
        done = operator.post("/outbox/act/pause/", confirmed)
    assert done.status_code == 302
    entry = OperatorAction.objects.get()
    assert entry.outcome == "failed" and "lock timeout" in entry.after["error"]


def test_findings_and_audit_do_not_wait_for_a_migration(world: World, operator: Client) -> None:
    for page, table in (("findings", "outbox_finding"), ("audit", "outbox_operator_action")):
        with held(world, f"LOCK TABLE {table}", alias="default"):
            answer = operator.get(f"/outbox/{page}/")
        assert answer.status_code == 503 and b"Another session holds a lock" in answer.content


def test_several_statements_have_one_deadline(
    dead: World, operator: Client, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    """Each statement is quicker than the deadline, all together are not; the server cancels the statement."""
    monkeypatch.setattr("outbox.contrib.console.access.SECONDS", 0.8)
    dead.sql("ALTER TABLE outbox.dead_letter RENAME TO slow_letter")
    dead.sql("CREATE VIEW outbox.dead_letter AS SELECT slow_letter.* FROM outbox.slow_letter,"
             " LATERAL (SELECT pg_sleep(0.5 + 0 * log_id)) AS late")  # fmt: skip
    answer = operator.get("/outbox/dead-letters/list/")
    assert answer.status_code == 503 and b"The search takes too long" in answer.content
    eventually(lambda: not busy(dead), what="the end of the statement on the server")


def busy(world: World) -> bool:
    running = "datname = current_database() AND state = 'active' AND pid <> pg_backend_pid()"
    return bool(world.sql(f"SELECT FROM pg_stat_activity WHERE {running}"))
