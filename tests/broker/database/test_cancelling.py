"""A deadline that cancels: the server's statement ends too, and a server that does not answer is left."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import closing

import psycopg
import pytest

from outbox.broker.database.connection import BrokerConnection, BrokerDatabase
from outbox.errors import BrokerUnavailable


@pytest.fixture
def bounded(broker_url: str) -> Iterator[BrokerConnection]:
    with closing(BrokerDatabase(broker_url).open()) as connection:
        yield connection


def test_a_late_statement_is_cancelled_and_the_connection_stays(bounded: BrokerConnection) -> None:
    with bounded.within(time.monotonic() + 0.2, cancel=True):
        with pytest.raises(psycopg.errors.QueryCanceled), bounded.transaction():
            bounded.execute("SELECT pg_sleep(60)")
        assert bounded.execute("SELECT 1").fetchone() == (1,)
    assert not bounded.closed and bounded.deadline is None


def test_a_frozen_server_process_is_left(bounded: BrokerConnection) -> None:
    backend = bounded.info.backend_pid
    os.kill(backend, signal.SIGSTOP)
    try:
        with (
            pytest.raises(BrokerUnavailable, match="did not answer within the deadline"),
            bounded.within(time.monotonic() + 0.2, cancel=True),
        ):
            bounded.execute("SELECT 1")
        assert bounded.closed
    finally:
        os.kill(backend, signal.SIGCONT)
