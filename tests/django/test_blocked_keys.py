"""Dead letters that block their keys: order, effects and conservation, also through kills; the limit; refusals."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from io import StringIO
from typing import Any

import pytest
from django.core.management import call_command
from django.db import connections

from outbox import Delivery, Mode, OnError, RetryPolicy
from outbox.broker.database.executor import Executor
from outbox.contrib.blocked_keys import BlockKey
from outbox.contrib.blocked_keys.blocking import first_of_key, list_blocked_keys
from outbox.contrib.blocked_keys.releasing import _FINISH, _LOOK, _NEXT, run_once
from outbox.contrib.django import publish, subscriber
from outbox.contrib.django.engine.broker import reset_broker
from outbox.contrib.django.worker.drain import drain, drain_after_others
from outbox.contrib.django.worker.workers import consumer_runtime
from outbox.errors import ConfigurationError, InvalidSubscription, PermanentError
from outbox.subscription import Subscription
from tests.django.sessions import broker_connection
from tests.django.shop.models import Effect, Order
from tests.django.support import differences
from tests.support import eventually, killed

pytestmark = pytest.mark.usefixtures("no_subscribers")

GROUP = "ledger"


class TooEarly(Exception):
    """Another system is not ready."""


def subscribe(mode: Mode = Mode.KEY_ORDERED, *, limit: int | None = 1000, **options: Any) -> None:
    """A handler that fails for good for each number with an order of status `broken`, and for a while if `early`."""

    blocking = [] if limit is None else [BlockKey(limit=limit)]

    @subscriber("steps", group=GROUP, mode=mode, options=blocking, start="earliest", **options)
    def book(delivery: Delivery) -> None:
        status = Order.objects.filter(number=delivery.tag).values_list("status", flat=True).first()
        if status == "broken":
            raise PermanentError(f"{delivery.tag} is broken")
        if status == "early":
            raise TooEarly(delivery.tag)
        Effect.objects.create(number=delivery.tag)


def send(*names: str, broken: str = "") -> None:
    """Publish a message each: the key is the first letter of its name."""
    if broken:
        Order.objects.create(number=broken, status="broken")
    for name in names:
        publish("steps", {}, key=name[0], tag=name, at_once=True)


def mend() -> None:
    Order.objects.all().delete()


def step() -> int:
    """One step of the leader."""
    with broker_connection() as (connection, schema):
        return run_once(Executor(connection, schema))


def work(consume: Callable[[], object] = drain) -> None:
    """Consume and release until nothing moves."""
    consume()
    while step():
        consume()


def effects(key: str) -> list[str]:
    """The names of the handled messages of a key, in the order of their transactions."""
    return [name for name in Effect.objects.order_by("pk").values_list("number", flat=True) if name[0] == key]


def letters() -> list[tuple[str, str]]:
    """The names of the open dead letters of the group, with the types of their errors."""
    with broker_connection() as (connection, schema):
        connection.execute("SELECT set_config('search_path', %s, false)", [schema])
        return connection.execute(
            "SELECT l.tag, split_part(d.error, ':', 1) FROM dead_letter d JOIN commit_log l USING (log_id)"
            " JOIN consumer_group USING (group_id) WHERE name = %s AND replayed_at IS NULL ORDER BY l.log_id",
            [GROUP],
        ).fetchall()


def settle(verb: str, *selection: str) -> None:
    call_command("outbox_dead_letter", verb, GROUP, *selection, no_input=True, stdout=StringIO())


def test_later_messages_of_the_key_wait_and_then_follow_in_order(path: str, databases: None) -> None:
    # The step from the dead letters back to the queue is the broker's own, so each mode runs on one of the paths.
    subscribe(Mode.KEY_ORDERED if path == "two_phase" else Mode.ORDERLY)
    send("a1", "b1", "a2", "a3", "b2", broken="a1")
    work()
    assert (effects("a"), effects("b")) == ([], ["b1", "b2"])
    assert letters() == [("a1", "PermanentError"), ("a2", "KeyBlocked"), ("a3", "KeyBlocked")]
    send("a4")
    work()
    assert [name for name, _ in letters()] == ["a1", "a2", "a3", "a4"]
    assert differences() == []
    mend()
    settle("replay", "--error-type", "PermanentError")
    work()
    assert effects("a") == ["a1", "a2", "a3", "a4"]
    assert letters() == []
    send("a5")
    drain()
    assert effects("a")[-1] == "a5"
    assert step() == 0
    assert differences() == []


@pytest.mark.usefixtures("databases")
def test_control_without_the_option_later_messages_pass() -> None:
    subscribe(limit=None)
    send("a1", "a2", broken="a1")
    work()
    assert (effects("a"), letters()) == (["a2"], [("a1", "PermanentError")])


@pytest.mark.usefixtures("databases")
def test_however_an_operator_settles_them_the_order_is_kept() -> None:
    subscribe()
    send("a1", "a2", "a3", "b1", "b2", "b3", "c1", "c2", "c3", broken="a1")
    Order.objects.create(number="b1", status="broken")
    Order.objects.create(number="c1", status="broken")
    work()
    mend()
    # All at once, also those that wait; the last one first; the first one discarded.
    settle("replay", "--key", "a")
    work()
    assert effects("a") == ["a1", "a2", "a3"]
    with broker_connection() as (connection, _):
        [last] = connection.execute("SELECT message_id FROM outbox.commit_log WHERE tag = 'b3'").fetchone() or [None]
    settle("replay", str(last))
    work()
    assert effects("b") == []
    settle("replay", "--key", "b", "--error-type", "PermanentError")
    work()
    assert effects("b") == ["b1", "b2", "b3"]
    settle("discard", "--key", "c", "--error-type", "PermanentError")
    work()
    assert effects("c") == ["c2", "c3"]
    assert letters() == []
    assert differences() == []


@pytest.mark.usefixtures("databases")
def test_a_waiting_message_that_fails_blocks_the_key_in_turn() -> None:
    subscribe()
    send("a1", "a2", "a3", broken="a1")
    work()
    mend()
    Order.objects.create(number="a2", status="broken")
    settle("replay", "--error-type", "PermanentError")
    work()
    assert effects("a") == ["a1"]
    assert letters() == [("a2", "PermanentError"), ("a3", "KeyBlocked")]
    mend()
    settle("replay", "--error-type", "PermanentError")
    work()
    assert effects("a") == ["a1", "a2", "a3"]


@pytest.mark.usefixtures("databases")
def test_a_replayed_message_blocks_its_key_until_it_is_handled() -> None:
    subscribe(retry=RetryPolicy(delays_seconds=[3600]))
    send("a1", broken="a1")
    work()
    Order.objects.update(status="early")
    settle("replay", "--all")
    work()
    # It has left the dead letters, and waits for its next attempt.
    assert letters() == []
    send("a2")
    work()
    assert (effects("a"), letters()) == ([], [("a2", "KeyBlocked")])
    mend()
    with broker_connection() as (connection, _):
        connection.execute("UPDATE outbox.scheduled SET due_at = now()")
    work()
    assert effects("a") == ["a1", "a2"]
    assert differences() == []


@pytest.mark.usefixtures("databases")
def test_above_the_limit_the_subscription_pauses_and_keeps_the_order() -> None:
    subscribe(limit=2)
    send("a1", "a2", "a3", "a4", broken="a1")
    work()
    assert [name for name, _ in letters()] == ["a1", "a2"]
    mend()
    settle("replay", "--error-type", "PermanentError")

    def done() -> bool:
        work()
        return len(effects("a")) == 4

    eventually(done, within_seconds=30, what=lambda: f"handled: {effects('a')}")
    assert effects("a") == ["a1", "a2", "a3", "a4"]
    assert differences() == []


def run(command: str, *arguments: str) -> None:
    call_command(command, *arguments, "--no-input", stdout=StringIO())


@pytest.mark.usefixtures("databases")
def test_erasure_changes_no_order() -> None:
    subscribe()
    send("a1", "a2", "b1", "b2", broken="a1")
    Order.objects.create(number="b1", status="broken")
    drain()
    # An erased message waits like every other, and is not passed over because its handler was not called.
    send("a3")
    run("outbox_erase", "steps", "--key", "a", "--reason", "request 17")
    work()
    assert [name for name, _ in letters()] == ["a1", "a2", "b1", "b2", "a3"]
    mend()
    settle("replay", "--key", "a")
    work()
    assert effects("a") == ["a1", "a2", "a3"]
    assert effects("b") == []


@pytest.mark.usefixtures("databases")
def test_after_a_reset_earlier_messages_of_the_key_come_first() -> None:
    subscribe()
    send("a0", "a1", "a2", broken="a1")
    work()
    assert effects("a") == ["a0"]
    Effect.objects.all().delete()
    run("outbox_group", "reset", GROUP, "steps", "--to-earliest", "--reprocess")
    work()
    assert (effects("a"), letters()) == (["a0"], [("a1", "PermanentError"), ("a2", "KeyBlocked")])
    # If now an earlier message fails, the key waits for this one.
    Order.objects.create(number="a0", status="broken")
    run("outbox_group", "reset", GROUP, "steps", "--to-earliest", "--reprocess")
    work()
    assert [error for _, error in letters()] == ["PermanentError", "KeyBlocked", "KeyBlocked"]
    mend()
    Effect.objects.all().delete()
    settle("replay", "--error-type", "PermanentError")
    work()
    assert (effects("a"), letters()) == (["a0", "a1", "a2"], [])
    assert differences() == []


def rows_read(table: str, work: Callable[[Executor], object]) -> int:
    """How many rows of a table of the broker a call reads."""
    text = "SELECT seq_tup_read + coalesce(idx_tup_fetch, 0) FROM pg_stat_xact_user_tables WHERE relname = %s"
    with broker_connection() as (connection, schema), connection.transaction(force_rollback=True):
        connection.execute("SET LOCAL enable_seqscan = off")
        [before] = connection.execute(text, [table]).fetchone() or [0]
        work(Executor(connection, schema))
        [after] = connection.execute(text, [table]).fetchone() or [0]
    return int(after - before)


@pytest.mark.usefixtures("databases")
def test_what_the_leader_and_the_calls_read_does_not_grow_with_what_they_do_not_need() -> None:
    subscribe(retry=RetryPolicy(delays_seconds=[3600]))
    send("a1", "a2", broken="a1")
    work()
    Order.objects.update(status="early")
    settle("replay", "--error-type", "PermanentError")
    work()
    with broker_connection() as (connection, _):
        # Dead letters of a group without the option, and a replay that is not finished.
        connection.execute(
            "INSERT INTO outbox.blocking_message (group_id, topic_id, key, log_id, message_id, state)"
            " SELECT 0, topic_id, n::text, n + 1000, gen_random_uuid(), 'failed'"
            " FROM outbox.topic, generate_series(1, 1000) n WHERE name = 'steps'"
        )
        connection.execute("ANALYZE outbox.blocking_message")
    for call in (lambda run: run.one(_LOOK), list_blocked_keys, lambda run: run.rows(_NEXT)):
        assert rows_read("blocking_message", call) < 10
    with broker_connection() as (connection, _):
        connection.execute(
            "UPDATE outbox.blocking_message SET state = 'settled', group_id = (SELECT group_id FROM"
            " outbox.consumer_group WHERE name = %s) WHERE group_id = 0",
            [GROUP],
        )
        [retry] = connection.execute(
            "SELECT outbox.queue.queue_id FROM outbox.queue JOIN outbox.topic USING (topic_id) WHERE retry_of ="
            " (SELECT group_id FROM outbox.consumer_group WHERE name = %s) AND number = (SELECT topic_id FROM"
            " outbox.topic WHERE name = 'steps')",
            [GROUP],
        ).fetchone() or [None]
        connection.execute(
            "INSERT INTO outbox.consume_queue (queue_id, queue_offset, log_id, attempt)"
            " SELECT %s, n, n + 1000, 0 FROM generate_series(1, 990) n",
            [retry],
        )
    send("a3")
    with broker_connection() as (connection, _):
        ids = dict(connection.execute("SELECT tag, message_id FROM outbox.commit_log").fetchall())
    asked = Subscription(topic="steps", group=GROUP, mode=Mode.KEY_ORDERED)
    for name, answer in (("a2", (ids["a1"], False)), ("a3", (ids["a1"], True))):
        ask = partial(first_of_key, subscription=asked, key="a", message_id=ids[name], limit=5)
        assert rows_read("blocking_message", ask) < 20
        with broker_connection() as (connection, schema):
            assert ask(Executor(connection, schema)) == answer
    assert rows_read("consume_queue", lambda run: run.execute(_FINISH)) < 2000
    with broker_connection() as (connection, schema):
        assert Executor(connection, schema).count(_FINISH) == 10
        connection.execute("DELETE FROM outbox.blocking_message WHERE log_id > 1000")


@pytest.mark.usefixtures("databases")
def test_what_a_subscription_cannot_keep_is_refused() -> None:
    class Own(Exception):
        pass

    for options, complaint in (
        ({"mode": Mode.CONCURRENT}, "keeps an order"),
        ({"batch": 5}, "batch=1"),
        ({"broadcast": True}, "no dead letters"),
        ({"on_error": {Own: OnError.RETRY_LATER}}, "retry_later"),
        ({"on_error": {PermanentError: OnError.RETRY}}, "must become a dead letter"),
    ):
        given: dict[str, Any] = {"topic": "steps", "group": GROUP, "mode": Mode.KEY_ORDERED, **options}
        with pytest.raises(InvalidSubscription, match=complaint):
            Subscription(options=[BlockKey()], **given)
    for limit in (0, 2**31, True):
        with pytest.raises(ConfigurationError, match=rf"limit={limit}.*from 1 to 2,147,483,647"):
            BlockKey(limit=limit)


# -- kills -----------------------------------------------------------------------------------------

WHILE_CONSUMING = ("consumer.before_send_back", "consumer.after_send_back", "consumer.before_offset")
WHILE_RELEASING = (
    *("blocked_keys.before_release", "blocked_keys.after_release", "consumer.before_handler"),
    *("consumer.before_inbox_commit", "consumer.after_inbox_commit", "consumer.after_offset"),
)


def killed_at(point: str) -> bool:
    """Whether a process that consumes and releases was killed at the first visit of a point."""
    # The child opens sessions of its own.
    reset_broker()
    connections.close_all()
    return killed(work, f"{point}=kill")


def survives(points: tuple[str, ...], outbox_settings: Callable[..., None]) -> None:
    """Kill a process at each point, and let another one continue: order, effects and counts are as without the kill."""
    outbox_settings(LEASE_SECONDS=1)
    subscribe()
    for key, point in zip("abcdefghijk", points, strict=False):
        names = [f"{key}{number}" for number in range(1, 5)]
        send(*names, broken=names[0])
        if point in WHILE_CONSUMING:
            assert killed_at(point), point
        work(drain_after_others)
        assert effects(key) == [], point
        assert [name for name, _ in letters()] == names, point
        mend()
        settle("replay", "--error-type", "PermanentError")
        if point in WHILE_RELEASING:
            assert killed_at(point), point
        work(drain_after_others)
        assert effects(key) == names, point
        assert letters() == [], point
        assert differences() == [], point


@pytest.mark.usefixtures("databases")
def test_a_kill_keeps_order_effects_and_counts(outbox_settings: Callable[..., None]) -> None:
    survives(("consumer.after_send_back", "blocked_keys.after_release"), outbox_settings)


@pytest.mark.slow
@pytest.mark.usefixtures("databases")
@pytest.mark.parametrize("point", [*WHILE_CONSUMING, *WHILE_RELEASING])
def test_a_kill_at_any_step_keeps_order_effects_and_counts(point: str, outbox_settings: Callable[..., None]) -> None:
    survives((point,), outbox_settings)


@pytest.mark.usefixtures("databases")
def test_the_leader_releases_in_a_running_worker() -> None:
    """The leader of a consumer process does the steps by itself."""
    subscribe()
    send("a1", "a2", "a3", broken="a1")
    stop = threading.Event()
    thread = threading.Thread(target=consumer_runtime(leads=True).run, args=[stop])
    thread.start()
    try:
        eventually(lambda: len(letters()) == 3, within_seconds=30, what="the dead letters")
        mend()
        settle("replay", "--error-type", "PermanentError")
        eventually(lambda: effects("a") == ["a1", "a2", "a3"], within_seconds=30, what="the effects")
    finally:
        stop.set()
        thread.join(20)
