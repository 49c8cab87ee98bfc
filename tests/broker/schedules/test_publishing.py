"""Each due moment of a schedule has one message: through kills, two leaders, pauses, restores and missed moments."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

from outbox import hooks
from outbox.broker.database.connection import BrokerConnection, BrokerDatabase
from outbox.broker.database.executor import Executor
from outbox.broker.log.topics import TopicCatalog, declare_topics
from outbox.broker.operations.audit import count_messages
from outbox.contrib.schedules import publishing
from outbox.contrib.schedules.publishing import ScheduleCounts, Scheduling, publish_now
from outbox.contrib.schedules.schedule import (
    NAME_HEADER,
    TIME_HEADER,
    Missed,
    Schedule,
    ScheduleRow,
    clock,
    declare,
    id_of,
    list_schedules,
    pause,
)
from outbox.topic import MessageType, Topic
from tests.broker.support import GROUP, TOPICS, process, queued_ids
from tests.restores import dump, reload_rows, restore_over
from tests.round_trips import counted
from tests.support import eventually

NOON = datetime(2027, 6, 1, 12, tzinfo=UTC)
HOUR = timedelta(hours=1)


def hourly(name: str = "report", **options: Any) -> Schedule:
    given = {"topic": "orders", "expression": "0 * * * *", **options}
    return Schedule(producer_group=GROUP, name=name, **given)


@pytest.fixture
def run(connection: BrokerConnection) -> Executor:
    return Executor(connection, "outbox")


def publish(run: Executor, now: datetime) -> ScheduleCounts:
    return publishing.run_once(run, TopicCatalog(), now=now)


def published(run: Executor) -> list[tuple[datetime, UUID]]:
    """The due moments and ids of all messages in the log, in the order of the log."""
    rows = run.connection.execute("SELECT headers, message_id FROM outbox.commit_log ORDER BY log_id").fetchall()
    return [(datetime.fromisoformat(headers[TIME_HEADER]), message_id) for headers, message_id in rows]


def moments(run: Executor) -> list[datetime]:
    return [at for at, _ in published(run)]


def row(run: Executor, name: str = "report") -> ScheduleRow:
    [found] = list_schedules(run, name=name)
    return found


# -- each due moment once --------------------------------------------------------------------------


def test_a_due_moment_is_published_once_and_says_for_which_time(run: Executor) -> None:
    declare(run, GROUP, [hourly(body=b'{"days": 1}')], now=NOON)
    assert publish(run, NOON + HOUR - timedelta(seconds=1)).published == 0
    assert publish(run, NOON + HOUR).published == 1
    assert publish(run, NOON + HOUR).published == 0
    [(headers, body, message_id, group)] = run.connection.execute(
        "SELECT headers, body, message_id, producer_group FROM outbox.commit_log"
    ).fetchall()
    assert headers == {NAME_HEADER: "report", TIME_HEADER: "2027-06-01T13:00:00+00:00"}
    assert (json.loads(body), message_id, group) == ({"days": 1}, id_of(GROUP, "report", NOON + HOUR), GROUP)
    found = row(run)
    assert (found.last_at, found.last_message_id, found.next_at) == (NOON + HOUR, message_id, NOON + 2 * HOUR)


def test_topics_with_one_type_of_messages_accept_it(run: Executor) -> None:
    for kind in (MessageType.NORMAL, MessageType.TRANSACTION):
        declare_topics(run, [Topic(name=f"only-{kind}", types=frozenset({kind}))])
        declare(run, GROUP, [hourly(str(kind), topic=f"only-{kind}")], now=NOON)
    assert publish(run, NOON + HOUR) == ScheduleCounts(published=2)


_PUBLISH = """
import contextlib, sys
from datetime import datetime
from outbox.broker.database.connection import BrokerDatabase
from outbox.broker.database.executor import Executor
from outbox.broker.log.topics import TopicCatalog
from outbox.contrib.schedules.publishing import run_once
with contextlib.closing(BrokerDatabase(sys.argv[1]).open()) as connection:
    run_once(Executor(connection, "outbox"), TopicCatalog(), now=datetime.fromisoformat(sys.argv[2]))
"""


def test_a_leader_killed_before_and_after_the_commit(run: Executor, database: BrokerDatabase) -> None:
    """Without the commit nothing is stored. After the commit the moment is not published again."""
    declare(run, GROUP, [hourly()], now=NOON)
    due = NOON + HOUR
    assert {name for name in hooks.fault_points if "schedule" in name} == {
        "schedule.after_append",
        "schedule.after_commit",
    }
    for step, stored in (("after_append", []), ("after_append", []), ("after_commit", [due])):
        killed = subprocess.run(
            [sys.executable, "-c", _PUBLISH, database.conninfo, due.isoformat()],
            env={**os.environ, "OUTBOX_FAULTS": f"schedule.{step}=kill"},
            check=False,
        )
        assert killed.returncode == -signal.SIGKILL
        assert moments(run) == stored, step
    assert publish(run, due).published == 0
    assert publish(run, due + HOUR).published == 1
    assert moments(run) == [due, due + HOUR]


def test_a_leader_that_read_a_moment_before_the_other_one_published_it(run: Executor, database: BrokerDatabase) -> None:
    """The row's lock makes the second leader wait; then it reads the row again."""
    declare(run, GROUP, [hourly()], now=NOON)
    with contextlib.closing(database.open()) as other:
        with other.transaction():
            publishing._publish_due(Executor(other, "outbox"), TopicCatalog(), GROUP, "report", NOON + HOUR)

            def waits() -> bool:
                waiting = "SELECT FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()"
                return run.connection.execute(waiting.encode()).fetchone() is not None

            def second() -> ScheduleCounts:
                with contextlib.closing(database.open()) as connection:
                    return publish(Executor(connection, "outbox"), NOON + HOUR)

            pool = ThreadPoolExecutor(1)
            result = pool.submit(second)
            eventually(waits, what="the second leader at the lock")
        assert result.result(20).published == 0
        pool.shutdown()
    assert moments(run) == [NOON + HOUR]


def test_the_broker_process_publishes_what_is_due_and_queues_it(
    run: Executor, database: BrokerDatabase, connection: BrokerConnection
) -> None:
    declare(run, GROUP, [hourly(expression="* * * * *")], now=datetime.now(UTC) - timedelta(minutes=3))
    with process(database):
        eventually(lambda: queued_ids(connection), what="the queued message")
    assert row(run).next_at > datetime.now(UTC)
    assert count_messages(run).differences() == []


class NotedDatabase(BrokerDatabase):
    """A database that notes the names of the sessions that are opened."""

    def open(self, *, timeout_seconds: float = 3.0, name: str = "outbox", direct: bool = False) -> BrokerConnection:
        opened.append(name)
        return super().open(timeout_seconds=timeout_seconds, name=name, direct=direct)


opened: list[str] = []


def test_a_leader_without_due_schedules_opens_no_connection_for_them(run: Executor, database: BrokerDatabase) -> None:
    """It looks on its own connection, with one statement every ten seconds; the thread only works if one is due."""
    opened.clear()
    scheduling = Scheduling(NotedDatabase(database.conninfo))
    scheduling.loop.start()
    with counted(run.connection) as round_trips:
        scheduling.look(run, 100.0)
        assert round_trips() == 1
    assert scheduling.look_at == 110.0
    now = clock(run)
    declare(run, GROUP, [hourly("later")], now=now)
    run.connection.execute("UPDATE outbox.schedule SET next_at = clock_timestamp() + interval '5 seconds'")
    scheduling.look(run, 100.0)
    assert 100.0 < scheduling.look_at <= 105.0
    run.connection.execute("UPDATE outbox.schedule SET next_at = clock_timestamp() + interval '1 hour'")
    declare(run, GROUP, [hourly("later"), hourly("now")], now=now - HOUR)
    pause(run, GROUP, "now", paused=True)
    scheduling.look(run, 100.0)
    assert (opened, scheduling.look_at) == ([], 110.0)
    pause(run, GROUP, "now", paused=False)
    scheduling.look(run, 100.0)
    eventually(lambda: len(published(run)) == 1, what="the message of the schedule that is due")
    scheduling.loop.stop()
    scheduling.loop.join()
    assert opened == ["outbox-schedules"]


@pytest.fixture
def own_database(new_database: Callable[..., str]) -> BrokerDatabase:
    """A broker in a database of its own, which a restore may replace."""
    from outbox.broker.schema.install import install

    database = BrokerDatabase(new_database())
    with contextlib.closing(database.open()) as connection:
        install(connection)
        declare_topics(Executor(connection, "outbox"), TOPICS)
    return database


@pytest.mark.parametrize("restored", [restore_over, reload_rows])
def test_after_a_restore_the_same_moment_has_the_same_id(
    own_database: BrokerDatabase, restored: Callable[[str, Path], None], tmp_path: Path
) -> None:
    """The log and `next_at` come from one dump. An inbox that has handled the message knows its id."""
    with contextlib.closing(own_database.open()) as connection:
        run = Executor(connection, "outbox")
        declare(run, GROUP, [hourly(missed=Missed.CATCH_UP)], now=NOON)
        publish(run, NOON + HOUR)
        file = dump(own_database.conninfo, tmp_path / "dump")
        publish(run, NOON + 2 * HOUR)
        before = published(run)
        restored(own_database.conninfo, file)
        assert published(run) == before[:1]
        publish(run, NOON + 2 * HOUR)
        assert published(run) == before


# -- missed moments --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("missed", "late", "wanted"),
    [
        (Missed.COALESCE, timedelta(minutes=30), [4]),
        (Missed.CATCH_UP, timedelta(minutes=30), [1, 2, 3, 4]),
        (Missed.SKIP, timedelta(minutes=30), []),
        (Missed.SKIP, timedelta(minutes=1), [4]),
    ],
)
@pytest.mark.parametrize("paused", [False, True], ids=["no leader", "paused"])
def test_moments_that_passed_without_a_message(
    run: Executor, missed: Missed, late: timedelta, wanted: list[int], paused: bool
) -> None:
    declare(run, GROUP, [hourly(missed=missed)], now=NOON)
    now = NOON + 4 * HOUR + late
    if paused:
        pause(run, GROUP, "report", paused=True)
        assert publish(run, now).published == 0
        pause(run, GROUP, "report", paused=False)
    publish(run, now)
    publish(run, now)
    assert moments(run) == [NOON + number * HOUR for number in wanted]
    assert row(run).next_at == NOON + 5 * HOUR


def test_catching_up_is_bounded_and_says_how_many_moments_have_no_message(
    run: Executor, caplog: pytest.LogCaptureFixture
) -> None:
    declare(run, GROUP, [hourly(expression="* * * * *", missed=Missed.CATCH_UP)], now=NOON)
    now = NOON + timedelta(minutes=1250, seconds=20)
    counts = publish(run, now)
    assert (counts.published, counts.dropped, counts.wait_seconds) == (100, 250, 0.0)
    assert "at least 250 due moments since 2027-06-01T12:01:00+00:00 have no message" in caplog.text
    while counts.published:
        counts = publish(run, now)
    assert counts.wait_seconds == 10.0
    found = moments(run)
    assert len(found) == 1000 and found == sorted(set(found))
    assert (found[0], found[-1]) == (NOON + timedelta(minutes=251), NOON + timedelta(minutes=1250))


# -- declarations ----------------------------------------------------------------------------------


def test_a_declaration_is_renewed_and_one_that_no_process_declares_is_removed_later(run: Executor) -> None:
    declare(run, GROUP, [hourly("kept"), hourly("gone")], now=NOON)
    minutes = [timedelta(minutes=number) for number in (5, 9, 11)]
    for passed in minutes:
        declare(run, GROUP, [hourly("kept")], now=NOON + passed)
    assert [one.name for one in list_schedules(run)] == ["kept"]
    declare(run, GROUP, [hourly("kept"), hourly("gone")], now=NOON)
    # Two versions of the service run: each declares what the other one does not.
    for passed in minutes:
        assert declare(run, GROUP, [hourly("kept")], now=NOON + passed).removed == 0
        assert declare(run, GROUP, [hourly("kept"), hourly("gone")], now=NOON + passed).removed == 0
    assert len(list_schedules(run)) == 2


def test_another_service_neither_changes_nor_removes_a_schedule_of_the_same_name(run: Executor) -> None:
    declare(run, GROUP, [hourly()], now=NOON)
    other = Schedule(producer_group="other", name="report", topic="orders", expression="30 * * * *")
    declare(run, "other", [other], now=NOON)
    assert [(one.producer_group, one.expression) for one in list_schedules(run)] == [
        ("other", "30 * * * *"),
        (GROUP, "0 * * * *"),
    ]
    publish(run, NOON + HOUR)
    assert len({message_id for _, message_id in published(run)}) == 2
    assert declare(run, "other", [], now=NOON + HOUR).removed == 1
    assert [one.producer_group for one in list_schedules(run)] == [GROUP]


def test_two_versions_that_change_a_declaration_in_turn_lose_no_moment(run: Executor) -> None:
    """During a deployment each process declares its own version once a minute."""
    old, new = hourly(expression="0 * * * *"), hourly(expression="0,30 * * * *")
    declare(run, GROUP, [old], now=NOON)
    at = NOON
    for number in range(150):
        at += timedelta(seconds=60)
        declare(run, GROUP, [new if number % 2 else old], now=at - timedelta(seconds=20))
        publish(run, at + timedelta(seconds=5))
    assert set(moments(run)) >= {NOON + HOUR, NOON + 2 * HOUR}
    assert len(moments(run)) == len(set(moments(run)))


def test_a_change_of_the_expression_does_not_publish_the_past(run: Executor) -> None:
    declare(run, GROUP, [hourly()], now=NOON)
    publish(run, NOON + HOUR)
    changed = hourly(expression="45 3 * * *")
    later = NOON + timedelta(minutes=119)
    assert declare(run, GROUP, [changed], now=later).changed == 1
    assert declare(run, GROUP, [changed], now=later).changed == 0
    assert row(run).next_at == datetime(2027, 6, 2, 3, 45, tzinfo=UTC)


@pytest.mark.parametrize("late", [timedelta(0), timedelta(seconds=9)])
def test_a_change_of_the_expression_does_not_drop_a_moment_that_has_just_become_due(
    run: Executor, late: timedelta
) -> None:
    """A worker with new code starts before the leader has published the moment, which the new code does not know."""
    declare(run, GROUP, [hourly()], now=NOON)
    changed = hourly(expression="30 * * * *")
    assert declare(run, GROUP, [changed], now=NOON + HOUR + late).changed == 0
    assert publish(run, NOON + HOUR + late).published == 1
    assert declare(run, GROUP, [changed], now=NOON + HOUR + timedelta(minutes=1)).changed == 1
    assert moments(run) == [NOON + HOUR]
    assert row(run).next_at == NOON + HOUR + timedelta(minutes=30)


def test_a_change_mends_a_schedule_that_cannot_be_published(run: Executor) -> None:
    declare(run, GROUP, [hourly(topic="missing")], now=NOON)
    assert publish(run, NOON + HOUR).failed == 1
    assert declare(run, GROUP, [hourly()], now=NOON + HOUR).changed == 1
    assert publish(run, NOON + HOUR).published == 1


def test_a_change_of_the_body_keeps_the_due_moment_and_the_pause(run: Executor) -> None:
    declare(run, GROUP, [hourly()], now=NOON)
    pause(run, GROUP, "report", paused=True)
    declare(run, GROUP, [hourly(body=b"[]")], now=NOON + 3 * HOUR)
    found = row(run)
    assert (found.body, found.next_at, found.paused_at is None) == (b"[]", NOON + HOUR, False)


# -- run now, and errors ---------------------------------------------------------------------------


def test_an_extra_message_has_an_id_of_its_own_and_moves_nothing(run: Executor) -> None:
    declare(run, GROUP, [hourly()], now=NOON)
    pause(run, GROUP, "report", paused=True)
    ids = {publish_now(run, TopicCatalog(), GROUP, "report", now=NOON) for _ in range(2)}
    assert ids == {message_id for _, message_id in published(run)} and len(ids) == 2
    found = row(run)
    assert (found.next_at, found.last_at, found.last_message_id in ids) == (NOON + HOUR, None, True)
    assert publish_now(run, TopicCatalog(), GROUP, "unknown") is None


def test_a_schedule_that_fails_keeps_its_error_and_hinders_no_other_one(run: Executor) -> None:
    declare(run, GROUP, [hourly("broken", topic="missing"), hourly("works")], now=NOON)
    counts = publish(run, NOON + HOUR)
    assert (counts.published, counts.failed, counts.wait_seconds) == (1, 1, 10.0)
    assert "topic 'missing' is not declared" in (row(run, "broken").error or "")
    assert row(run, "works").error is None
    declare_topics(run, [Topic(name="missing")])
    assert publish(run, NOON + HOUR).published == 1
    assert row(run, "broken").error is None


def test_an_error_of_the_database_hinders_no_other_schedule(run: Executor) -> None:
    declare(run, GROUP, [hourly("broken", body=b"broken"), hourly("works")], now=NOON)
    run.connection.execute(
        "ALTER TABLE outbox.commit_log ADD CONSTRAINT of_the_operator CHECK (body IS DISTINCT FROM 'broken'::bytea)"
    )
    try:
        counts = publish(run, NOON + HOUR)
    finally:
        run.connection.execute("ALTER TABLE outbox.commit_log DROP CONSTRAINT of_the_operator")
    assert (counts.published, counts.failed) == (1, 1)
    assert "of_the_operator" in (row(run, "broken").error or "")


def test_a_row_that_this_machine_cannot_read_is_an_error_of_the_row(run: Executor) -> None:
    declare(run, GROUP, [hourly()], now=NOON)
    run.connection.execute("UPDATE outbox.schedule SET timezone = 'Mars/Olympus'")
    assert publish(run, NOON + HOUR).failed == 1
    assert "time zone 'Mars/Olympus'" in (row(run).error or "")
