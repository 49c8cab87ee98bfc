"""A tick waits for the disk if a repetition after a crash of the server could differ from it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import psycopg
import pytest

from outbox.broker.database.executor import Executor
from outbox.broker.log import commit_log
from outbox.broker.log.topics import TopicCatalog
from outbox.broker.transaction import decisions
from outbox.transaction import HalfTransaction
from tests.broker.support import drain, end, message, new_sequencer
from tests.broker.test_server_crashes import Server, server
from tests.broker.traffic import LEDGER

__all__ = ["server"]


def _survives(server: Server, work: Callable[[psycopg.Connection[tuple[object, ...]]], object]) -> bool:
    """Whether what a tick makes of the work is there after a crash of the server."""
    sequencer = new_sequencer(server.database)
    with contextlib.closing(server.database.open()) as ticking:
        drain(sequencer, ticking)
        before = server.heads()
        with psycopg.connect(server.database.conninfo, autocommit=True) as connection:
            work(connection)
        drain(sequencer, ticking)
    heads = server.heads()
    assert heads != before
    server.crash()
    server.start()
    return server.heads() == heads


@pytest.mark.slow
def test_a_tick_waits_where_it_could_not_be_made_again(server: Server) -> None:
    """Because its decision may be lost with it, or because a recall finds again what it has taken."""

    def send(connection: psycopg.Connection[tuple[object, ...]]) -> None:
        commit_log.append_decided(Executor(connection, "outbox"), TopicCatalog(), [message()])

    def send_relaxed(connection: psycopg.Connection[tuple[object, ...]]) -> None:
        connection.execute("SET synchronous_commit = off")
        send(connection)

    def retry_that_is_due(connection: psycopg.Connection[tuple[object, ...]]) -> None:
        connection.execute(
            "INSERT INTO outbox.scheduled (log_id, due_at) SELECT min(log_id), now() FROM outbox.commit_log"
        )

    assert not _survives(server, send)
    assert _survives(server, send_relaxed)
    assert _survives(server, retry_that_is_due)


def test_an_end_waits_unless_a_ledger_knows_the_answer(server: Server) -> None:
    """Pruning, which removes answers of the ledger, waits until the ends it has seen are on disk."""

    def survives(*, has_ledger: bool, flushes: bool = False) -> bool:
        half = HalfTransaction(producer_group="shop", messages=[message()], ledger_id=LEDGER if has_ledger else None)
        with psycopg.connect(server.database.conninfo, autocommit=True) as connection:
            run = Executor(connection, "outbox")
            commit_log.append_half(run, TopicCatalog(), half)
            decisions.record_end(run, end(half.transaction_id))
            if flushes:
                decisions.flush(run)
        server.crash()
        server.start()
        with psycopg.connect(server.database.conninfo, autocommit=True) as connection:
            return bool(decisions.standing_decisions(Executor(connection, "outbox"), [half.transaction_id]))

    assert not survives(has_ledger=True)
    assert survives(has_ledger=False)
    assert survives(has_ledger=True, flushes=True)
