"""The producer's pool of connections."""

from __future__ import annotations

import time

from outbox.broker.database.connection import BrokerDatabase, Pool


def test_a_connection_is_kept_for_the_next_call(server_url: str) -> None:
    pool = Pool(BrokerDatabase(server_url))
    with pool.connection(time.monotonic() + 60) as first:
        pass
    with pool.connection(time.monotonic() + 60) as second:
        assert second is first
    pool.close()
    assert first.closed


def test_what_is_given_back_to_a_closed_pool_is_closed(server_url: str) -> None:
    """Like a thread that was in the middle of a call."""
    pool = Pool(BrokerDatabase(server_url))
    with pool.connection(time.monotonic() + 60) as connection:
        pool.close()
        assert not connection.closed
    assert connection.closed
    with pool.connection(time.monotonic() + 60) as later:
        pass
    assert later.closed
