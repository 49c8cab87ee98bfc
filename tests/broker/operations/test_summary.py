"""The summary equals a count. The leader refreshes it, so that a status need not count."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg.types.json import Jsonb

from outbox import Delivery
from outbox.broker import operations
from outbox.broker.database.executor import Executor
from outbox.broker.groups.registration import register
from outbox.broker.leading import LeaderSettings
from outbox.broker.operations import summary
from outbox.broker.operations.audit import count_messages
from outbox.broker.operations.progress import list_blocked, list_queues
from outbox.broker.operations.rules import survey
from outbox.broker.operations.summary import run_once
from outbox.errors import PermanentError
from outbox.subscription import Mode, Subscription
from tests.broker.bench import AT_ONCE, ConsumptionBench, keyed
from tests.broker.support import process
from tests.support import eventually

GROW_WITH_THE_LOG = ("commit_log", "op_log", "consume_queue")


def consumed(bench: ConsumptionBench) -> None:
    """Two groups on two topics: one has failed on some messages, both are behind."""
    for topic in ("orders", "payments"):
        bench.declare(topic)
        bench.publish(keyed(topic, 40, 10))

    def fail_on_some(delivery: Delivery) -> None:
        if delivery.key in ("k3", "k4"):
            raise PermanentError("not these")

    bench.run_until_idle(Subscription(topic="orders", group="points", retry=AT_ONCE), fail_on_some)
    bench.run_until_idle(Subscription(topic="payments", group="cart", mode=Mode.ORDERLY), lambda _: None)
    bench.publish(keyed("orders", 7, 7))
    bench.publish(keyed("payments", 5, 5))


def test_it_equals_a_count_of_every_queue(bench: ConsumptionBench) -> None:
    """One definition of progress, read in three ways: for all groups, for one group, and entry by entry."""
    consumed(bench)
    fail_first(bench)
    counted = summary.count(bench.run)
    queues = list_queues(bench.run)
    for one in counted.groups:
        of_place = [queue for queue in queues if (queue.group, queue.topic) == (one.group, one.topic)]
        assert of_place == [queue for queue in list_queues(bench.run, one.group, one.topic) if queue.topic == one.topic]
        assert (one.queues, {one.paused}) == (len(of_place), {queue.paused for queue in of_place})
        for name in ("lag", "queued", "handled", "filtered", "skipped", "sent_back", "dead", "expired"):
            assert getattr(one, name) == sum(getattr(queue, name) for queue in of_place), name
        assert one.blocked == sum(queue.blocked_by is not None for queue in of_place)
        assert one.stopped == sum(queue.stopped is not None for queue in of_place)
        oldest = min((queue.oldest_at.timestamp() for queue in of_place if queue.oldest_at is not None), default=None)
        assert one.oldest_at == (oldest if oldest is None else pytest.approx(oldest, abs=1e-4))
    for group in count_messages(bench.run).groups.values():
        of_group = [one for one in counted.groups if one.group == group.name]
        first = [one for one in of_group if not one.is_retry]
        assert (group.lag, group.queued) == (sum(one.lag for one in first), sum(one.queued for one in first))
        for name in ("handled", "filtered", "skipped", "expired"):
            assert getattr(group, name) == sum(getattr(one, name) for one in of_group), name
    lags = {(one.group, one.topic): one.lag for one in counted.groups if one.lag}
    assert lags == {("points", "orders"): 7, ("cart", "payments"): 5, ("strict", "parcels"): 3}
    [blocked] = list_blocked(bench.run, ["points", "strict"], ["orders", "parcels"], limit=20)
    assert (blocked.group, blocked.topic, str(blocked.blocked_error).split("\n")[0]) == (
        "strict", "parcels", "ValueError: not yet",
    )  # fmt: skip
    [rest] = [rest for rest in counted.rests if rest.group == "points"]
    assert rest.dead == 8
    assert {one.topic: one.queued for one in counted.topics} == {"orders": 47, "payments": 45, "parcels": 3}


def test_the_row_that_counts_is_found_in_two_places_only() -> None:
    """A third statement that finds it in its own way may disagree with them."""
    broker = Path(operations.__file__).parent.parent
    found = {
        path.name: path.read_text(encoding="utf-8")
        for path in broker.rglob("*.py")
        if re.search(r"epoch DESC, (\w+\.)?ordinal DESC", path.read_text(encoding="utf-8"))
    }
    assert set(found) == {"offsets.py", "progress.py"}


def fail_first(bench: ConsumptionBench) -> None:
    """An ordered group whose first message fails, with two others behind it."""
    bench.declare("parcels", queues=1)
    bench.publish(keyed("parcels", 3, 1))

    def fail(_: Delivery) -> None:
        raise ValueError("not yet")

    with bench.running((Subscription(topic="parcels", group="strict", mode=Mode.ORDERLY), fail)):
        eventually(
            lambda: bench.rows("SELECT 1 FROM outbox.failure WHERE NOT error LIKE '%%these%%'"), what="a failure"
        )


def test_the_oldest_is_the_first_that_is_not_finished(bench: ConsumptionBench) -> None:
    consumed(bench)
    bench.connection.execute(
        "UPDATE outbox.commit_log SET stored_at = stored_at - interval '1 hour' WHERE log_id <= 80"
    )
    counted = summary.count(bench.run)
    [one] = [one for one in counted.groups if (one.group, one.topic) == ("points", "orders")]
    assert one.oldest_at is not None and counted.at - one.oldest_at < 600, "those an hour old are finished"


def test_what_an_ordered_handler_keeps_failing_on_has_waited_since_it_came(bench: ConsumptionBench) -> None:
    bench.declare("orders")
    bench.publish(keyed("orders", 1, 1))
    bench.connection.execute("UPDATE outbox.commit_log SET stored_at = stored_at - interval '1 hour'")

    def fail(_: Delivery) -> None:
        raise ValueError("not yet")

    with bench.running((Subscription(topic="orders", group="strict", mode=Mode.ORDERLY), fail)):
        eventually(lambda: bench.rows("SELECT 1 FROM outbox.failure"), what="the first failure")
    [one] = [one for one in summary.count(bench.run).groups if one.group == "strict"]
    assert one.blocked == 1
    assert one.oldest_at is not None and summary.count(bench.run).at - one.oldest_at > 3000


def test_counting_does_not_wait_for_a_lock(bench: ConsumptionBench) -> None:
    """It would count as work, and the next count would come twenty times as long after it."""
    consumed(bench)
    with psycopg.connect(bench.database.conninfo) as holder:
        # So that this ends where it does wait.
        holder.execute("SET idle_in_transaction_session_timeout = '10s'")
        holder.execute("LOCK TABLE outbox.consume_queue")
        with pytest.raises(psycopg.errors.LockNotAvailable):
            run_once(bench.database)
        holder.rollback()
    run_once(bench.database)
    assert summary.read(bench.run).stored_age_seconds is not None


def test_what_is_read_is_what_was_stored(bench: ConsumptionBench) -> None:
    consumed(bench)
    stored = summary.refresh(bench.run)
    read = summary.read(bench.run)
    assert (read.groups, read.rests, read.topics, read.producers) == (
        list(stored.groups), list(stored.rests), list(stored.topics), list(stored.producers),
    )  # fmt: skip
    assert not read.is_late and read.age_seconds < 60


def test_an_old_summary_is_counted_again(bench: ConsumptionBench) -> None:
    consumed(bench)
    summary.refresh(bench.run)
    bench.connection.execute("UPDATE outbox.summary SET at = at - interval '1 hour'")
    bench.publish(keyed("orders", 3, 3))
    read = summary.read(bench.run)
    assert read.is_late and sum(one.lag for one in read.groups) == 15


def test_code_of_another_version_reads_the_columns_it_knows(bench: ConsumptionBench) -> None:
    consumed(bench)
    stored = summary.refresh(bench.run)
    [(facts,)] = bench.rows("SELECT facts FROM outbox.summary")
    changed: dict[str, Any] = facts | {"of_a_later_version": {}}
    groups = facts["groups"]
    changed["groups"] = {"columns": ["new", *groups["columns"]], "rows": [["?", *row] for row in groups["rows"]]}
    bench.connection.execute(b"UPDATE outbox.summary SET facts = %s", [Jsonb(changed)])
    assert summary.read(bench.run).groups == list(stored.groups)


def test_the_leader_refreshes_it(bench: ConsumptionBench) -> None:
    consumed(bench)
    with process(bench.database, LeaderSettings(summary_seconds=0.05)):
        eventually(lambda: bench.rows("SELECT 1 FROM outbox.summary"), what="a first summary")
        bench.publish(keyed("orders", 100, 100))
        eventually(lambda: sum(one.lag for one in summary.read(bench.run).groups) == 112, what="the new lag")
    [(rows,)] = bench.rows("SELECT count(*) FROM outbox.summary")
    assert rows > 1


def rows_read(connection: psycopg.Connection[Any]) -> dict[str, int]:
    """The number of rows that this session has read since it began, by table."""
    found = connection.execute(
        "SELECT relname::text, seq_tup_read + coalesce(idx_tup_fetch, 0) FROM pg_stat_xact_user_tables"
        " WHERE schemaname = 'outbox' AND relname = ANY (%s)",
        [list(GROW_WITH_THE_LOG)],
    ).fetchall()
    return dict(found)


def test_looking_reads_nothing_that_grows_with_the_log(bench: ConsumptionBench) -> None:
    consumed(bench)
    bench.publish(keyed("orders", 3000, 100))
    bench.connection.execute("ANALYZE")
    summary.refresh(bench.run)
    with bench.database.connect() as fresh, fresh.transaction():
        assert survey(Executor(fresh, "outbox")).state is not None
        assert rows_read(fresh).keys() == set(GROW_WITH_THE_LOG)
        assert {table: read for table, read in rows_read(fresh).items() if read > 20} == {}
    # The control: counting reads them, and this would find it.
    with bench.database.connect() as fresh, fresh.transaction():
        fresh.execute("SELECT count(*) FROM outbox.commit_log")
        assert rows_read(fresh)["commit_log"] > 3000


def test_looking_for_a_blocked_queue_leaves_out_the_other_topics_of_its_group(bench: ConsumptionBench) -> None:
    fail_first(bench)
    bench.declare("wide", queues=50)
    bench.connection.execute(
        b"INSERT INTO outbox.subscription (group_id, topic_id, mode) SELECT group_id, topic_id, 'orderly'"
        b" FROM outbox.consumer_group, outbox.topic WHERE topic.name = 'wide'"
    )
    bench.publish(keyed("wide", 500, 500))
    bench.connection.execute("ANALYZE")
    summary.refresh(bench.run)
    with bench.database.connect() as fresh, fresh.transaction():
        [found] = [one for one in survey(Executor(fresh, "outbox")).verdict.conditions if one.name == "blocked_queue"]
        assert [fact["topic"] for fact in found.evidence] == ["parcels"]
        assert rows_read(fresh)["commit_log"] <= 5


def test_an_impossible_time_beside_a_usual_one(bench: ConsumptionBench) -> None:
    for topic in ("orders", "points"):
        bench.declare(topic)
        register(bench.run, Subscription(group="g", topic=topic))
        bench.publish(keyed(topic, 1, 1))
    bench.connection.execute(
        "UPDATE outbox.commit_log SET stored_at = '-infinity' FROM outbox.topic"
        " WHERE topic.topic_id = commit_log.topic_id AND name = 'orders'"
    )
    [group] = summary.overview(bench.run, summary.count(bench.run)).groups
    assert group.lag == 2
