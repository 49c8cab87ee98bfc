"""FIFO: messages of one key are queued in the order of their log positions, transactional ones too."""

from __future__ import annotations

import contextlib
import random
from datetime import UTC, datetime, timedelta
from uuid import UUID

from hypothesis import given, settings
from hypothesis import strategies as st

from outbox.broker.database.connection import BrokerConnection, BrokerDatabase
from outbox.broker.database.executor import Executor
from outbox.broker.leading import HINT_AFTER_SECONDS
from outbox.broker.log.commit_log import append_decided
from outbox.broker.log.topics import TopicCatalog
from outbox.broker.postgres import PostgresBroker
from outbox.broker.sequencer.key_order import KeyOrder
from outbox.message import Message
from outbox.topic import Topic
from outbox.transaction import Answer, Check, CheckSettings, Decision
from outbox.utils.ids import uuid7
from tests.broker.support import ANY, FIFO, assert_gapless, drain, end, half, message, new_sequencer, queued, queued_ids
from tests.support import eventually


def _send_half(broker: PostgresBroker, key: str, topic: str = "ordered") -> UUID:
    one = half(message(topic, key=key))
    broker.send_half(one)
    return one.transaction_id


def test_a_new_leader_after_a_cut_backlog_knows_what_was_decided_but_not_read(
    broker: PostgresBroker, database: BrokerDatabase, connection: BrokerConnection
) -> None:
    first, second = _send_half(broker, "k"), _send_half(broker, "k")
    broker.end([end(second)])
    broker.end([end(first)])
    # The tick takes only the second one's decision; then the leader changes.
    assert new_sequencer(database, batch=1).run_once(connection).held == 1
    drain(new_sequencer(database, batch=1), connection)
    assert queued_ids(connection) == [first, second]


def test_a_cut_backlog_keeps_the_order_of_local_commits_on_the_atomic_path(
    broker: PostgresBroker, database: BrokerDatabase, connection: BrokerConnection
) -> None:
    """The transaction that began first and published last has the lower transaction id: the cut falls between."""
    first, second = message("ordered", key="k"), message("ordered", key="k")
    catalog = TopicCatalog(database.schema)
    with contextlib.closing(database.open()) as early:
        with early.transaction():
            early.execute("SELECT pg_current_xact_id()")
            append_decided(Executor(connection, database.schema), catalog, [first])
            append_decided(Executor(early, database.schema), catalog, [second])
    broker.send([message() for _ in range(3)])
    sequencer = new_sequencer(database, batch=1)
    sequencer.run_once(connection)
    # Also across a change of the leader.
    drain(new_sequencer(database, batch=1), connection)
    drain(sequencer, connection)
    assert queued_ids(connection, "ordered") == [first.message_id, second.message_id]
    assert connection.execute("SELECT count(*) FROM outbox.held").fetchone() == (0,)
    assert_gapless(connection)


def test_halves_of_before_a_restore_block_no_message(
    broker: PostgresBroker, database: BrokerDatabase, connection: BrokerConnection
) -> None:
    """They may carry ids of the future, which the new server reaches one day."""
    old = _send_half(broker, "k")
    broker.end([end(old)])
    drain(new_sequencer(database), connection)
    connection.execute("UPDATE outbox.broker SET timeline = timeline + 7")
    sequencer = new_sequencer(database)
    drain(sequencer, connection)
    connection.execute(
        "UPDATE outbox.commit_log SET xid = (pg_current_xact_id()::text::bigint + 3)::text::xid8 WHERE half"
    )
    for _ in range(10):
        connection.execute("SELECT pg_current_xact_id()")
    new = _send_half(broker, "k")
    broker.end([end(new)])
    drain(sequencer, connection)
    assert queued_ids(connection) == [old, new]


def test_a_delayed_message_blocks_no_other_and_joins_its_key_when_due(
    broker: PostgresBroker, database: BrokerDatabase, connection: BrokerConnection
) -> None:
    delayed = half(message("ordered", key="k", deliver_at=datetime.now(UTC) + timedelta(seconds=0.3)))
    broker.send_half(delayed)
    later = _send_half(broker, "k")
    broker.end([end(later)])
    sequencer = new_sequencer(database)
    drain(sequencer, connection)
    assert queued_ids(connection) == [later]
    broker.end([end(delayed.transaction_id)])
    eventually(lambda: drain(sequencer, connection).due or len(queued_ids(connection)) == 2)
    assert queued_ids(connection) == [later, delayed.transaction_id]


def test_a_parked_blocker_holds_its_key_or_releases_it_as_declared(
    database: BrokerDatabase, connection: BrokerConnection
) -> None:
    broker = PostgresBroker(database, check=CheckSettings(immunity_seconds=0, max_checks=1))
    sequencer = new_sequencer(database)
    blockers = {topic: _send_half(broker, "k", topic) for topic in ("ordered", "released")}
    waiting = {topic: _send_half(broker, "k", topic) for topic in ("ordered", "released")}
    broker.end([end(one) for one in waiting.values()])
    assert drain(sequencer, connection).held == 2
    checks = broker.claim_checks("shop")
    assert {check.transaction_id for check in checks} == set(blockers.values())
    broker.report_answers(
        "shop", [Answer(transaction_id=check.transaction_id, decision=Decision.UNKNOWN) for check in checks]
    )
    drain(sequencer, connection)
    assert queued_ids(connection) == [waiting["released"]]
    # A late end still decides; the released one's turn has passed.
    broker.end([end(one) for one in blockers.values()])
    drain(new_sequencer(database), connection)
    assert queued_ids(connection, "ordered") == [blockers["ordered"], waiting["ordered"]]
    assert queued_ids(connection, "released") == [waiting["released"], blockers["released"]]
    broker.close()


def test_a_blocker_is_checked_early_and_read_only(
    broker: PostgresBroker, database: BrokerDatabase, connection: BrokerConnection
) -> None:
    blocker, waiting = _send_half(broker, "k"), _send_half(broker, "k")
    broker.end([end(waiting)])
    sequencer = new_sequencer(database)
    drain(sequencer, connection)
    assert broker.claim_checks("shop") == []

    def hinted() -> list[Check]:
        drain(sequencer, connection)
        return broker.claim_checks("shop")

    found = eventually(hinted, within_seconds=HINT_AFTER_SECONDS + 5)
    assert [(check.transaction_id, check.may_write) for check in found] == [(blocker, False)]


# -- models ------------------------------------------------------------------------------------------------

_STEPS = st.lists(st.tuples(st.sampled_from("hhpcrt"), st.integers(0, 1), st.integers(0, 9)), max_size=40)


@given(steps=_STEPS)
@settings(max_examples=100, deadline=None)
def test_model_of_key_order(steps: list[tuple[str, int, int]]) -> None:
    """Random halves, decisions and passes on two keys: never out of order, never stuck, nothing lost."""
    order = KeyOrder()
    log: dict[int, tuple[int, str]] = {}
    unread: list[int] = []
    released: list[int] = []

    def tick() -> None:
        unread_now = list(unread)
        unread.clear()
        order.close(unread_now)
        passed = order.release(100)
        for log_id in sorted(one for one in unread_now if log[one][1] == "c"):
            if order.must_wait(log_id, (0, str(log[log_id][0]))):
                order.hold(log_id, (0, str(log[log_id][0])), now=0.0)
            else:
                passed.append(log_id)
        released.extend(sorted(passed))

    for what, key, choice in steps:
        open_rows = [log_id for log_id, (_, state) in log.items() if state == "h"]
        if what == "h":
            log[len(log)] = (key, "h")
            order.open(len(log) - 1, (0, str(key)), uuid7())
        elif what == "p":
            log[len(log)] = (key, "c")
            unread.append(len(log) - 1)
        elif what == "t":
            tick()
        elif open_rows:
            decided = open_rows[choice % len(open_rows)]
            log[decided] = (log[decided][0], what)
            unread.append(decided)
    tick()
    for key in (0, 1):
        of_key = [log_id for log_id in released if log[log_id][0] == key]
        assert of_key == sorted(of_key), "out of order"
        first_open = min((i for i, (k, state) in log.items() if k == key and state == "h"), default=len(log))
        free = [i for i, (k, state) in log.items() if k == key and state == "c" and i < first_open]
        assert of_key == free, "stuck, lost or too early"


def test_random_decisions_on_a_real_broker_keep_every_key_in_order(
    broker: PostgresBroker, database: BrokerDatabase, connection: BrokerConnection
) -> None:
    rng = random.Random(7)
    sequencer = new_sequencer(database, batch=5)
    undecided: list[UUID] = []
    sent: dict[str, list[UUID]] = {"a": [], "b": [], "c": []}
    rolled_back: set[UUID] = set()
    for _ in range(150):
        choice = rng.random()
        key = rng.choice("abc")
        if choice < 0.4:
            undecided.append(_send_half(broker, key))
            sent[key].append(undecided[-1])
        elif choice < 0.5:
            plain: Message = message("ordered", key=key)
            broker.send([plain])
            sent[key].append(plain.message_id)
        elif choice < 0.9 and undecided:
            one = undecided.pop(rng.randrange(len(undecided)))
            decision = rng.choice([Decision.COMMIT, Decision.COMMIT, Decision.ROLLBACK])
            broker.end([end(one, decision)])
            if decision is Decision.ROLLBACK:
                rolled_back.add(one)
        else:
            sequencer = new_sequencer(database, batch=5) if rng.random() < 0.2 else sequencer
            sequencer.run_once(connection)
    broker.end([end(one) for one in undecided])
    drain(sequencer, connection)
    entries = queued(connection)
    for key, ids in sent.items():
        expected = [one for one in ids if one not in rolled_back]
        assert [entry.message_id for entry in entries if entry.key == key] == expected
    assert_gapless(connection)


# -- a topic becomes FIFO, or stops to be, while messages are open ------------------------------------------


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
