"""Sends and ends: idempotent, first decision wins, contradictions and refusals reported."""

from __future__ import annotations

import contextlib
import random
import threading
from functools import partial
from uuid import UUID

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from psycopg.errors import CheckViolation

from outbox.broker.database.connection import BrokerConnection, BrokerDatabase
from outbox.broker.database.executor import Executor
from outbox.broker.log import commit_log
from outbox.broker.log.topics import TopicCatalog
from outbox.broker.postgres import PostgresBroker
from outbox.broker.transaction import decisions
from outbox.errors import UsageError
from outbox.transaction import Decision, EndStatus, EndTransaction, HalfTransaction
from outbox.utils.ids import uuid7
from tests.broker.support import drain, end, half, in_threads, message, new_sequencer, queued_ids

COMMIT, ROLLBACK = Decision.COMMIT, Decision.ROLLBACK


def test_unknown_is_no_outcome(broker: PostgresBroker) -> None:
    with pytest.raises(UsageError):
        broker.end([end(uuid7(), Decision.UNKNOWN)])


def test_racing_decisions_of_two_connections(database: BrokerDatabase, connection: BrokerConnection) -> None:
    broker = PostgresBroker(database)
    halves = [half() for _ in range(60)]
    for one in halves:
        broker.send_half(one)
    start = threading.Barrier(2)

    def report(decision: Decision, seed: int) -> list[EndStatus]:
        ends = [end(one.transaction_id, decision) for one in halves]
        random.Random(seed).shuffle(ends)
        statuses: dict[UUID, EndStatus] = {}
        with contextlib.closing(database.connect()) as own:
            start.wait()
            for first in range(0, 60, 6):
                batch = ends[first : first + 6]
                found = decisions.record_ends(Executor(own, "outbox"), batch)
                statuses |= dict(zip((one.transaction_id for one in batch), found, strict=True))
        return [statuses[one.transaction_id] for one in halves]

    committed, rolled_back = in_threads([partial(report, COMMIT, 1), partial(report, ROLLBACK, 2)])
    assert isinstance(committed, list) and isinstance(rolled_back, list)
    standing = decisions.standing_decisions(Executor(connection, "outbox"), [one.transaction_id for one in halves])
    for one, first, second in zip(halves, committed, rolled_back, strict=True):
        assert {first, second} == {EndStatus.APPLIED, EndStatus.CONTRADICTED}
        assert standing[one.transaction_id] is (COMMIT if first is EndStatus.APPLIED else ROLLBACK)
    drain(new_sequencer(database), connection)
    assert len(queued_ids(connection)) == sum(status is EndStatus.APPLIED for status in committed)
    broker.close()


_REPORTS = st.lists(
    st.tuples(st.integers(0, 3), st.sampled_from([COMMIT, ROLLBACK]), st.sampled_from(["shop", "other"])), max_size=12
)


@given(reports=_REPORTS, batch=st.integers(1, 4))
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_model_of_the_op_log(broker: PostgresBroker, reports: list[tuple[int, Decision, str]], batch: int) -> None:
    """Against a dictionary: every status of every report, in any order and batching; half 3 is never stored."""
    halves = [half() for _ in range(4)]
    for one in halves[:3]:
        broker.send_half(one)
    model: dict[int, Decision] = {}
    expected = []
    for number, decision, group in reports:
        if number == 3 or group != "shop":
            expected.append(EndStatus.REFUSED)
        elif number not in model:
            model[number] = decision
            expected.append(EndStatus.APPLIED)
        else:
            expected.append(EndStatus.REPEATED if model[number] is decision else EndStatus.CONTRADICTED)
    found: list[EndStatus] = []
    for first in range(0, len(reports), batch):
        found += broker.end(
            [
                EndTransaction(transaction_id=halves[number].transaction_id, decision=decision, producer_group=group)
                for number, decision, group in reports[first : first + batch]
            ]
        )
    assert found == expected


def test_concurrent_resends_of_one_call(database: BrokerDatabase, connection: BrokerConnection) -> None:
    batch = [message() for _ in range(20)]
    catalog = TopicCatalog()

    def send() -> list[object]:
        with contextlib.closing(database.connect()) as own:
            return [receipt.position for receipt in commit_log.append_decided(Executor(own, "outbox"), catalog, batch)]

    results = in_threads([send] * 6)
    assert all(result == results[0] for result in results)
    drain(new_sequencer(database), connection)
    assert sorted(queued_ids(connection)) == sorted(one.message_id for one in batch)


def test_messages_of_one_call_keep_their_order(
    broker: PostgresBroker, database: BrokerDatabase, connection: BrokerConnection
) -> None:
    # Ids that do not ascend, as an application with its own ids may send them.
    batch = [message("ordered", key="k") for _ in range(20)][::-1]
    broker.send(batch)
    drain(new_sequencer(database), connection)
    assert queued_ids(connection) == [one.message_id for one in batch]


def test_an_end_that_names_a_later_message_of_a_transaction_is_refused(broker: PostgresBroker) -> None:
    two = HalfTransaction(producer_group=half().producer_group, messages=[message(), message()])
    broker.send_half(two)
    later = two.messages[1].message_id
    assert broker.end([end(later, COMMIT), end(two.transaction_id, COMMIT)]) == [EndStatus.REFUSED, EndStatus.APPLIED]


def test_a_decision_is_commit_or_rollback(broker: PostgresBroker, connection: BrokerConnection) -> None:
    """The table has no CHECK (docs/decisions/199), so the one statement that takes any character refuses others."""
    one = half(message())
    broker.send_half(one)
    with pytest.raises(CheckViolation, match="neither C nor R"):
        connection.execute("SELECT outbox.record_end(%s, 'X', %s)", [one.transaction_id, one.producer_group])
    assert connection.execute("SELECT FROM outbox.op_log").fetchall() == []
