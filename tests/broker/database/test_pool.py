"""The producer's pool of connections."""

from __future__ import annotations

import time

from outbox.broker.database.connection import BrokerConnection, BrokerDatabase, Pool


def test_a_connection_is_kept_for_the_next_call(server_url: str) -> None:
    pool = Pool(BrokerDatabase(server_url))
    first = pool.lend(time.monotonic() + 60, lambda connection: connection)
    assert pool.lend(time.monotonic() + 60, lambda connection: connection) is first
    pool.close()
    assert first.closed


def test_what_is_given_back_to_a_closed_pool_is_closed(server_url: str) -> None:
    """Like a thread that was in the middle of a call."""
    pool = Pool(BrokerDatabase(server_url))

    def close_the_pool(connection: BrokerConnection) -> BrokerConnection:
        pool.close()
        assert not connection.closed
        return connection

    assert pool.lend(time.monotonic() + 60, close_the_pool).closed
    assert pool.lend(time.monotonic() + 60, lambda connection: connection).closed
