"""Timeouts that are set on a database do not stop the statements of the ledger's check and pruning."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import pytest
from django.db import connections, transaction

from outbox import Decision
from outbox.contrib.django.ledger import ledger
from outbox.contrib.django.ledger.ledger_checker import open_connection
from outbox.contrib.django.ledger.pruning import first_id_after
from outbox.utils.ids import uuid7
from tests.django.test_barrier import answers, check, row

pytestmark = pytest.mark.usefixtures("impatient")

SETTINGS = ("statement_timeout", "lock_timeout", "transaction_timeout", "idle_in_transaction_session_timeout")
SLOW = """
CREATE FUNCTION slow() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN PERFORM pg_sleep(0.4); RETURN NULL; END $$;
CREATE TRIGGER slow AFTER INSERT OR DELETE ON outbox_ledger FOR EACH STATEMENT EXECUTE FUNCTION slow();
"""


@pytest.fixture
def impatient(empty_log: None) -> Iterator[None]:
    """New connections to the database have timeouts, and writing to its ledger takes longer."""
    # The application's own transaction is not what is tried here.
    connections["default"].ensure_connection()
    with closing(open_connection("default")) as connection, connection.cursor() as cursor:
        cursor.execute("SELECT name FROM pg_settings WHERE name = ANY (%s)", [list(SETTINGS)])
        known = [name for (name,) in cursor.fetchall()]
        database = connection.ops.quote_name(connection.settings_dict["NAME"])
        for name in known:
            cursor.execute(f"ALTER DATABASE {database} SET {name} = '200ms'")
        cursor.execute(SLOW)
        yield
        cursor.execute("DROP FUNCTION slow() CASCADE")
        for name in known:
            cursor.execute(f"ALTER DATABASE {database} RESET {name}")


def test_the_barrier_is_written_and_rows_are_pruned() -> None:
    absent = [check(uuid7()) for _ in range(3)]
    found = answers(absent)
    assert {found[one.transaction_id].decision for one in absent} == {Decision.ROLLBACK}
    assert {row("default", one.transaction_id) for one in absent} == {"R"}
    with closing(open_connection("default")) as connection:
        ledger.advance_pruned_before(connection, first_id_after(max(one.transaction_id for one in absent)))
        assert ledger.delete(connection, [one.transaction_id for one in absent]) == 3
        with connection.cursor() as cursor:
            cursor.execute("SELECT current_setting('statement_timeout')")
            assert cursor.fetchone() == ("200ms",), "not beyond the transaction"


def test_a_running_transaction_is_still_not_waited_for() -> None:
    running, other = check(uuid7()), check(uuid7())
    with transaction.atomic():
        ledger.insert_committed(connections["default"], running.transaction_id)
        found = answers([running, other])
    assert found[running.transaction_id].decision is Decision.UNKNOWN
    assert found[running.transaction_id].counts is False
    assert found[other.transaction_id].decision is Decision.ROLLBACK
