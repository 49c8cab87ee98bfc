"""A row that no consumer can read: the functions refuse it, and one that is there fails itself only."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any
from uuid import UUID

import psycopg
import pytest
from psycopg.types.json import Jsonb

from outbox.broker.database.executor import EARLIEST, LATEST
from outbox.broker.database.statement import Statement
from outbox.broker.maintenance import future_times
from outbox.broker.operations import dead_letters, search, summary, trace
from outbox.broker.transaction import checks
from outbox.message import Message
from outbox.subscription import Mode, Subscription
from outbox.transaction import CheckSettings, HalfTransaction
from outbox.utils.ids import uuid7
from tests.broker.bench import AT_ONCE, ConsumptionBench, Seen, encode

FAR = "2999-12-31T00:00:00Z"
HOSTILE: dict[str, dict[str, Any]] = {
    "born before time": {"born_at": "-infinity"},
    "born after time": {"born_at": "infinity"},
    "born before Christ": {"born_at": "0044-03-15 12:00:00 BC"},
    "born after 9999": {"born_at": "10000-01-01"},
    "due before time": {"deliver_at": "-infinity"},
    "due after 9999": {"deliver_at": "12000-01-01"},
    "a long key": {"key": "k" * 100_000},
    "a long tag": {"tag": "t" * 100_000},
    "a list of headers": {"headers": Jsonb(["a"])},
    "a negative shard": {"shard": -5},
    "a negative topic": {"topic_id": -1},
    "a content type of two lines": {"content_type": "text/plain\r\nX-Admin: 1"},
    "a content type without an end": {"content_type": "a" * 300},
}
# Python refuses to load these documents, which the database holds.
NOT_LOADED: dict[str, dict[str, Any]] = {
    "a long number as header": {"headers": '{"x": ' + "1" * 5_000 + "}"},
    "deep headers": {"headers": '{"x": ' + "[" * 3_000 + "]" * 3_000 + "}"},
}
# Those of them that a consumer meets when they are stored nevertheless.
UNREADABLE = {
    **{name: HOSTILE[name] for name in list(HOSTILE)[:5]},
    "a list of headers": HOSTILE["a list of headers"],
    "a number as header": {"headers": Jsonb({"a": 1})},
    **NOT_LOADED,
}
_ONE = """
SELECT outbox.append_one(%(message_id)s, %(topic_id)s, %(shard)s, %(key)s, %(tag)s, %(content_type)s, '{}',
    %(headers)s, %(born_at)s, %(deliver_at)s, NULL, '', false, false, NULL, NULL)
"""
_HALF = """
SELECT outbox.append_one(%(message_id)s, %(topic_id)s, %(shard)s, %(key)s, %(tag)s, %(content_type)s, '{}',
    %(headers)s, %(born_at)s, %(deliver_at)s, NULL, 'shop', true, true, 60, NULL)
"""
_BATCH = """
SELECT outbox.append_batch(%(message_id)s, ARRAY[%(message_id)s::uuid, %(other)s], ARRAY[%(born_at)s::timestamptz,
    now()], ARRAY[%(deliver_at)s::timestamptz, NULL], ARRAY[%(topic_id)s::integer, 1], ARRAY[%(shard)s::integer, NULL],
    ARRAY[%(key)s, ''], ARRAY[%(tag)s, ''], ARRAY[%(content_type)s, 'a/b'], ARRAY[%(headers)s::jsonb, NULL],
    ARRAY['{}'::bytea, '{}'], ARRAY[NULL::float8, NULL], 1, '', '', '', false, false, NULL, NULL, %(all_new)s)
"""
_ROW = """
WITH stored AS (
    INSERT INTO outbox.commit_log (born_at, deliver_at, transaction_id, message_id, topic_id, shard, half,
                                   producer_group, key, tag, content_type, headers, body, immunity_seconds)
    VALUES (%(born_at)s, %(deliver_at)s, %(message_id)s, %(message_id)s, %(topic_id)s, %(shard)s, %(half)s, 'shop',
            %(key)s, %(tag)s, %(content_type)s, %(headers)s, '{}', 0)
    RETURNING log_id, transaction_id
)
INSERT INTO outbox.op_log (transaction_id, decision, decided_by, log_ids)
SELECT transaction_id, 'C', 'P', ARRAY[log_id] FROM stored
WHERE NOT %(half)s
"""


@pytest.fixture
def orders(bench: ConsumptionBench) -> ConsumptionBench:
    bench.declare("orders")
    bench.declare("others")
    return bench


def row(bench: ConsumptionBench, **values: Any) -> dict[str, Any]:
    [(topic_id,)] = bench.rows("SELECT topic_id FROM outbox.topic WHERE name = 'orders'")
    usual = {"born_at": "2026-01-01", "deliver_at": None, "key": "k", "tag": "", "headers": None, "shard": None}
    more = {"content_type": "application/json", "message_id": uuid7(), "other": uuid7(), "topic_id": topic_id}
    return {**usual, **more, "half": False, "all_new": False, **values}


def stored(bench: ConsumptionBench) -> int:
    [(count,)] = bench.rows("SELECT count(*) FROM outbox.commit_log")
    return int(count)


def test_the_functions_refuse_what_the_log_cannot_deliver(orders: ConsumptionBench) -> None:
    for name, values in HOSTILE.items():
        for statement, more in ((_ONE, {}), (_HALF, {}), (_BATCH, {}), (_BATCH, {"all_new": True})):
            given = row(orders, **values, **more)
            with pytest.raises(psycopg.errors.InvalidParameterValue, match=str(given["message_id"])):
                orders.connection.execute(statement, given)
            assert stored(orders) == 0, name
    for content_type in ("text/plain\r\nX-Admin: 1", "", "a" * 300):
        with pytest.raises(psycopg.errors.InvalidParameterValue, match="content types"):
            orders.connection.execute("SELECT outbox.publish_bytes('orders', '', %s)", [content_type])
    for statement, more in ((_ONE, {}), (_HALF, {}), (_BATCH, {}), (_BATCH, {"all_new": True})):
        usual = row(orders, headers=Jsonb({"a": "b"}), shard=0, deliver_at=FAR, key="k" * 255, **more)
        orders.connection.execute(statement, usual)
    assert stored(orders) == 6


@pytest.mark.parametrize("options", [{}, {"batch": 5}, {"mode": Mode.KEY_ORDERED}], ids=["plain", "batch", "ordered"])
def test_an_unreadable_row_is_a_dead_letter_and_holds_up_nothing(
    orders: ConsumptionBench, options: dict[str, Any]
) -> None:
    ids: dict[UUID, str] = {}
    for n, (name, values) in enumerate(UNREADABLE.items()):
        given = row(orders, **{"key": f"k{n}", **values})
        ids[given["message_id"]] = name
        orders.connection.execute(_ROW, given)
    orders.publish(
        [Message(topic=topic, key=f"k{n}", body=encode({"n": n})) for topic in ("orders", "others") for n in range(3)]
    )
    seen, others = Seen(), Seen()

    def handle(given: Any) -> None:
        for one in given if isinstance(given, list) else [given]:
            seen(one)

    runtime = orders.runtime(
        (Subscription(group="g", topic="orders", retry=AT_ONCE, **options), handle),
        (Subscription(group="g", topic="others"), others),
    )
    while any(vars(runtime.run_once()).values()):
        orders.sequence()
    assert (seen.take(), others.take()) == ([0, 1, 2], [0, 1, 2])
    letters = dead_letters.list_dead_letters(orders.run, "g")
    assert {letter.message_id for letter in letters} == set(ids)
    for letter in letters:
        assert letter.attempts == 1
        assert letter.error.startswith(f"UndecodableBody: message {letter.message_id} (log id ")
        assert ("headers" in letter.error) == ("header" in ids[letter.message_id])
    orders.assert_conserved("g")


def test_a_half_that_nobody_can_read_leaves_the_checks_of_others(orders: ConsumptionBench) -> None:
    hostile = {**UNREADABLE, "a long key": HOSTILE["a long key"], "a shard": HOSTILE["a negative shard"]}
    wanted = set()
    for values in hostile.values():
        given = row(orders, half=True, **values)
        wanted.add(given["message_id"])
        orders.connection.execute(_ROW, given)
    good = Message(topic="orders", body=encode({}))
    orders.broker.send_half(HalfTransaction(producer_group="shop", messages=[good], immunity_seconds=0))
    claimed = checks.claim_checks(orders.run, "shop", limit=100, settings=CheckSettings())
    assert {check.transaction_id for check in claimed} == {*wanted, good.message_id}
    assert all(check.message.born_at.year in range(1, 10_000) for check in claimed)


def test_a_time_without_end_stops_no_tick_no_fetch_and_no_check(orders: ConsumptionBench) -> None:
    """Before version 17, PostgreSQL cannot subtract such a time."""
    orders.connection.execute(_ROW, row(orders, deliver_at="infinity"))
    orders.publish([Message(topic="orders", key="k", headers={"outbox-timeout": "60"}, body=encode({"n": 0}))])
    halves = {time: row(orders, half=True) for time in ("infinity", "-infinity")}
    for given in halves.values():
        orders.connection.execute(_ROW, given)
    statement = "UPDATE outbox.commit_log SET stored_at = %s::timestamptz WHERE message_id = coalesce(%s, message_id)"
    for time, message_id in (("infinity", None), ("-infinity", halves["-infinity"]["message_id"])):
        orders.connection.execute(statement, [time, message_id])
    seen = Seen()
    orders.run_until_idle(Subscription(group="g", topic="orders"), seen)
    assert seen.ns == [0]
    [claimed] = checks.claim_checks(orders.run, "shop", limit=100, settings=CheckSettings())
    assert claimed.transaction_id == halves["-infinity"]["message_id"]
    future_times.mend(orders.run)
    assert orders.rows("SELECT count(*) FROM outbox.pending_check WHERE due_at < 'infinity'") == [(2,)]
    for given in halves.values():
        assert checks.find_undecided(orders.run, given["message_id"]) is not None


def test_readers_show_such_rows(orders: ConsumptionBench) -> None:
    ids = []
    for values in (*HOSTILE.values(), *NOT_LOADED.values()):
        given = row(orders, **{**values, "topic_id": row(orders)["topic_id"]})
        orders.connection.execute(_ROW, given)
        ids.append(given["message_id"])
    orders.sequence()
    # The leader queues each of them, also with a negative shard; one waits for the year 12000.
    assert orders.rows("SELECT count(*) FROM outbox.consume_queue") == [(len(ids) - 1,)]
    found = search.find_messages(orders.run, topic="orders")
    assert {one.message_id for one in found} == set(ids)
    assert len(search.find_messages(orders.run, topic="orders", with_content=True)) == len(ids)
    for message_id in ids:
        shown = trace.trace(orders.run, message_id)
        assert shown is not None and shown.messages[0].message_id == str(message_id)
        content = search.content_of(orders.run, message_id)
        assert content is not None and content.body == b"{}"
    assert summary.refresh(orders.run).at > 0


def test_a_time_that_python_cannot_hold_is_the_first_or_the_last_that_it_can(bench: ConsumptionBench) -> None:
    """In every time zone of the session, and beside usual times."""
    times = ["-infinity", "0044-03-15 BC", "0001-01-01 00:00 UTC", "2026-01-01 UTC", "9999-12-31 23:59 UTC", "infinity"]
    for zone in ("UTC", "Europe/Berlin", "America/Chicago"):
        bench.connection.execute("SELECT set_config('TimeZone', %s, false)", [zone])
        statement = Statement("SELECT unnest(%(times)s::timestamptz[])")
        read = [value for (value,) in bench.run.execute(statement, {"times": times})]
        assert (read[0], read[1], read[-1]) == (EARLIEST, EARLIEST, LATEST)
        assert read[3] == datetime(2026, 1, 1, tzinfo=UTC)
        assert all(EARLIEST.year <= value.year <= LATEST.year for value in read)
