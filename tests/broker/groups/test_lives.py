"""Beginning a life of the server: rows that were stored from the memory of a former life are reverted."""

from __future__ import annotations

from dataclasses import replace
from uuid import UUID, uuid4

from outbox.broker.database.connection import BrokerConnection, BrokerDatabase
from outbox.broker.groups import leases, lives, offsets, send_back
from outbox.broker.groups.offsets import OffsetRow, Position
from outbox.broker.groups.registration import register
from outbox.broker.postgres import PostgresBroker
from tests.broker.bench import ConsumptionBench
from tests.broker.groups.test_groups import messages, subscribe
from tests.broker.support import message, new_sequencer, queued_ids


def _crash(bench: ConsumptionBench) -> None:
    """Empty the one unlogged table, as a crash does."""
    bench.run.connection.execute("TRUNCATE outbox.life_sign")


def test_a_life_lasts_until_the_server_crashes(bench: ConsumptionBench) -> None:
    first = lives.current(bench.run)
    assert lives.current(bench.run) == first
    _crash(bench)
    assert lives.current(bench.run) != first


def test_positions_beyond_what_is_there_are_taken_back(bench: ConsumptionBench) -> None:
    """As a consumer that survived stores them; its lease does not count any more, but it owns it until its end."""
    bench.declare("orders", queues=1)
    bench.publish(messages(0, 3))
    register(bench.run, subscribe())
    owner, life = uuid4(), lives.current(bench.run)
    [lease] = leases.acquire(bench.run, owner, 1, [1], life=life, term_seconds=600)
    ahead = Position(5, 0, handled=4, sent_back=1)
    assert offsets.store(bench.run, owner, [OffsetRow(lease.key, lease.epoch, 1, ahead)]) == {lease.key}
    bench.run.connection.execute("INSERT INTO outbox.finished_ahead VALUES (1, 1, 2, false), (1, 1, 3, false)")

    _crash(bench)
    assert lives.current(bench.run) != life
    assert lives.heads_since(bench.run, life) == [{1: 3}]
    assert offsets.load(bench.run, 1, [1]) == {1: replace(ahead, next_offset=3, moved=-2)}
    assert send_back.sent_away(bench.run, 1, [1]) == {1: {2: False}}
    assert offsets.store(bench.run, owner, [OffsetRow(lease.key, lease.epoch, 2, ahead)]) == set()
    assert leases.acquire(bench.run, uuid4(), 1, [1], life=life, term_seconds=600) == []
    [again] = leases.acquire(bench.run, owner, 1, [1], life=life, term_seconds=600)
    assert again.epoch > lease.epoch + 1


def test_for_an_unknown_life_all_lives_are_returned(bench: ConsumptionBench) -> None:
    lives.current(bench.run)
    _crash(bench)
    lives.current(bench.run)
    assert len(lives.heads_since(bench.run, UUID(int=0))) == 2


def test_no_tick_is_made_in_a_life_that_has_not_begun(
    database: BrokerDatabase, connection: BrokerConnection, broker: PostgresBroker
) -> None:
    sequencer = new_sequencer(database)
    sequencer.run_once(connection)
    connection.execute("TRUNCATE outbox.life_sign")
    [sent] = broker.send([message()])
    assert sequencer.run_once(connection).collided
    assert queued_ids(connection) == []
    assert sequencer.run_once(connection).appended == 1
    assert queued_ids(connection) == [sent.message_id]
