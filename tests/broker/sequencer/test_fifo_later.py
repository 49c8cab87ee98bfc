"""A topic becomes FIFO, or stops to be, while messages are open: the sequencer looks at them by the rules of now."""

from __future__ import annotations

from outbox.broker.database.connection import BrokerConnection, BrokerDatabase
from outbox.broker.postgres import PostgresBroker
from outbox.topic import Topic
from tests.broker.support import ANY, FIFO, drain, end, half, message, new_sequencer, queued_ids


def test_halves_of_before_keep_their_place_when_a_topic_becomes_fifo(
    broker: PostgresBroker, database: BrokerDatabase, connection: BrokerConnection
) -> None:
    first = half(message("orders", key="k"))
    broker.send_half(first)
    sequencer = new_sequencer(database)
    # The sequencer has read past the open half, which blocked no message.
    drain(sequencer, connection)
    broker.send([message("orders", key="another")])
    drain(sequencer, connection)
    broker.declare([Topic(name="orders", types=FIFO, queue_count=4)])
    second = message("orders", key="k")
    broker.send([second])
    assert drain(sequencer, connection).held == 1
    broker.end([end(first.transaction_id)])
    drain(sequencer, connection)
    assert queued_ids(connection)[-2:] == [first.transaction_id, second.message_id]


def test_held_messages_continue_when_a_topic_is_not_fifo_any_more(
    broker: PostgresBroker, database: BrokerDatabase, connection: BrokerConnection
) -> None:
    first = half(message("ordered", key="k"))
    broker.send_half(first)
    behind = message("ordered", key="k")
    broker.send([behind])
    sequencer = new_sequencer(database)
    assert drain(sequencer, connection).held == 1
    broker.declare([Topic(name="ordered", types=ANY, queue_count=2)])
    drain(sequencer, connection)
    assert queued_ids(connection) == [behind.message_id]
    broker.end([end(first.transaction_id)])
    drain(sequencer, connection)
    assert queued_ids(connection) == [behind.message_id, first.transaction_id]
