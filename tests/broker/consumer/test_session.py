"""A consumer's connection: none is left behind by a stay that did not begin."""

from __future__ import annotations

import psycopg
import pytest

from outbox.broker.consumer import session
from outbox.broker.consumer.session import ConsumerSession
from outbox.broker.database.connection import BrokerConnection, BrokerDatabase
from outbox.codec import Codecs
from outbox.ports import call_handler
from tests.support import eventually


def test_a_connection_on_which_listening_failed_is_closed(
    database: BrokerDatabase, connection: BrokerConnection, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> None:
        raise psycopg.OperationalError("too many notifications in the NOTIFY queue")

    monkeypatch.setattr(session, "listen", fails)
    # The error is kept, and with it what its frames refer to: nothing is closed for want of references.
    with pytest.raises(psycopg.OperationalError) as kept:
        ConsumerSession(
            database,
            lambda run, instance: [],
            invoker=call_handler,
            codecs=Codecs(),
            lease_seconds=10,
            strategy=(),
        )
    sessions = (
        "SELECT count(*) FROM pg_stat_activity "
        "WHERE application_name = 'outbox-consumer' AND datname = current_database()"
    )
    eventually(lambda: connection.execute(sessions).fetchall() == [(0,)])
    assert kept.value is not None
