"""The inbox in partitions: every id has a partition at each moment, and no row goes that is needed again."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from datetime import UTC, datetime, timedelta
from io import StringIO
from itertools import pairwise
from uuid import UUID, uuid4, uuid5

import pytest
from django.core.management import call_command
from django.core.management.base import CommandError
from django.db import connection, connections

from outbox import Delivery
from outbox.broker.database.executor import Executor
from outbox.broker.maintenance import retention
from outbox.contrib.django import publish, subscriber
from outbox.contrib.django.database.aliases import broker_connection
from outbox.contrib.django.ledger import partitions, pruning
from outbox.contrib.django.ledger.ledger_checker import open_connection
from outbox.contrib.django.ledger.partitions import Partition, bound, list_partitions
from outbox.contrib.django.ledger.pruning import PruneCounts, prune_inboxes
from outbox.contrib.django.models import InboxEntry
from outbox.contrib.django.worker.workers import consumer_runtime
from outbox.utils import faults
from outbox.utils.ids import uuid7
from tests.django.shop.models import Effect
from tests.django.support import sequence, undivide_inboxes
from tests.support import eventually

pytestmark = pytest.mark.usefixtures("databases", "no_subscribers")

DAY = timedelta(days=1)
# A pass at this time examines the partition of now.
LATER = timedelta(days=3)


def install(*arguments: str) -> str:
    out = StringIO()
    call_command("outbox_install", "--partition-inbox", *arguments, stdout=out, no_color=True)
    return out.getvalue()


@pytest.fixture
def inbox(databases: None) -> Iterator[None]:
    """The inboxes as `migrate` makes them, before and after the test."""
    yield
    faults.arm("")
    undivide_inboxes()


@pytest.fixture
def divided(inbox: None) -> None:
    """The inbox of `default` in partitions."""
    with closing(open_connection("default")) as opened:
        assert partitions.convert(opened, now=datetime.now(UTC) - DAY / 2, width=DAY, patience_seconds=5)


@pytest.fixture
def _effects(databases: None, no_subscribers: None) -> None:
    @subscriber("orders", group="effects")
    def effect(delivery: Delivery) -> None:
        Effect.objects.create(number=delivery.key)


def consume(*keys: str) -> list[UUID]:
    """Publish and handle a message for each key."""
    found = [publish("orders", {}, key=key, at_once=True).message_id for key in keys]
    sequence()
    consumer_runtime().run_once()
    return found


def deliver_all_again() -> None:
    """As after a failover that lost the newest offsets."""
    call_command("outbox_group", "reset", "effects", "orders", "--to-earliest", stdout=StringIO())
    consumer_runtime().run_once()


def empty_log() -> None:
    """Let retention remove the messages."""
    with broker_connection() as (broker, schema):
        broker.execute(b"UPDATE outbox.commit_log SET stored_at = stored_at - interval '20 days'")
        retention.run_once(Executor(broker, schema))


def prune(later: timedelta = LATER) -> PruneCounts:
    """A pass that takes all rows handled until now for old ones."""
    return prune_inboxes(older_than=datetime.now(UTC) + later)


def layout() -> list[Partition]:
    return list_partitions(connection)


def row(message_id: UUID, group: str = "effects", days_ago: float = 20) -> InboxEntry:
    at = datetime.now(UTC) - days_ago * DAY
    return InboxEntry(group=group, generation=1, message_id=message_id, handled_at=at)


def id_of(moment: datetime) -> UUID:
    """An id of UUID version 7 of this time."""
    return UUID(int=bound(moment).int | uuid7().int & (1 << 80) - 1)


def covers_all_ids(parts: list[Partition]) -> bool:
    """Whether the partitions follow each other from the smallest id to the greatest one."""
    return (
        parts[0].first is None
        and parts[-1].stop is None
        and all(before.stop == after.first for before, after in pairwise(parts))
    )


# -- conversion --------------------------------------------------------------------------------------


def test_the_command_divides_an_inbox_and_keeps_its_rows_and_rights(inbox: None) -> None:
    now = datetime.now(UTC)
    ids = [uuid7(), UUID(int=0), UUID(int=(1 << 128) - 1), id_of(now + 30 * DAY), id_of(now - 400 * DAY), uuid4()]
    InboxEntry.objects.bulk_create(row(one) for one in ids)
    with connection.cursor() as cursor:
        cursor.execute("GRANT SELECT, INSERT ON outbox_inbox TO pg_monitor")
    planned = install("--dry-run")
    assert "Put the inbox into partitions on: default, other" in planned and layout() == []
    install()
    parts = layout()
    assert covers_all_ids(parts)
    assert set(InboxEntry.objects.values_list("message_id", flat=True)) == set(ids)
    made = [one for one in parts if one.is_dropped_whole]
    assert [one.name for one in made if not one.name[-1].isdigit()] == ["outbox_inbox_time_former"]
    assert len(made) == 2 + partitions.PER_RETENTION
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT privilege_type FROM pg_class, aclexplode(relacl) "
            "WHERE oid = 'outbox_inbox'::regclass AND grantee = 'pg_monitor'::regrole ORDER BY 1"
        )
        assert cursor.fetchall() == [("INSERT",), ("SELECT",)]
    assert "There is nothing to do" in install()
    assert layout() == parts


def test_each_id_finds_a_partition(divided: None) -> None:
    edges = [value for one in layout() for value in (one.first, one.stop) if value is not None]
    beside = [UUID(int=value.int + step) for value in edges for step in (-1, 0, 1)]
    ids = {*beside, UUID(int=0), UUID(int=(1 << 128) - 1), *(uuid4() for _ in range(200)), *(uuid7() for _ in range(9))}
    InboxEntry.objects.bulk_create(row(one) for one in ids)
    assert InboxEntry.objects.count() == len(ids)


def test_a_view_on_the_inbox_stops_the_command_before_it_changes_anything(inbox: None) -> None:
    with connection.cursor() as cursor:
        cursor.execute("CREATE VIEW handled_today AS SELECT * FROM outbox_inbox")
        try:
            with pytest.raises(CommandError, match="the view handled_today would stay with the former table"):
                install()
            assert layout() == []
        finally:
            cursor.execute("DROP VIEW handled_today")


# -- passes ------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("divided", "_effects")
def test_a_partition_goes_and_the_rows_of_messages_in_the_log_stay() -> None:
    consume("one", "two")
    gone = [row(uuid7(), group) for group in ("effects", "other") for _ in range(50)]
    InboxEntry.objects.bulk_create(gone)
    assert InboxEntry.objects.count() == 102
    counts = prune()
    assert counts.partitions > 0
    assert InboxEntry.objects.count() == 2
    assert covers_all_ids(layout())
    deliver_all_again()
    assert Effect.objects.count() == 2
    empty_log()
    assert prune().inbox == 2
    assert InboxEntry.objects.count() == 0


@pytest.mark.usefixtures("divided")
def test_a_row_that_was_handled_late_stays_for_the_whole_retention() -> None:
    """A delayed message, or a group that was behind: its id is old, its effect is not."""
    late, old = id_of(datetime.now(UTC) - DAY / 4), id_of(datetime.now(UTC) - DAY / 4)
    InboxEntry.objects.bulk_create([row(late, days_ago=-5), row(old)])
    assert prune().partitions > 0
    assert list(InboxEntry.objects.values_list("message_id", flat=True)) == [late]
    prune(6 * DAY)
    assert InboxEntry.objects.count() == 0


@pytest.mark.usefixtures("divided", "_effects")
def test_a_partition_with_many_rows_that_must_stay_is_kept_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(partitions, "_MOST_ROWS", 2)
    consume("one", "two", "three")
    InboxEntry.objects.bulk_create([row(uuid7())])
    before = [one for one in layout() if one.first and one.first < uuid7() < (one.stop or uuid7())]
    assert prune(2 * DAY).partitions >= 0
    assert InboxEntry.objects.count() == 4
    assert [one for one in layout() if one in before] == before
    deliver_all_again()
    assert Effect.objects.count() == 3


@pytest.mark.usefixtures("divided")
def test_rows_of_derived_ids_go_one_by_one() -> None:
    ids = [uuid5(UUID(int=0), str(number)) for number in range(300)]
    InboxEntry.objects.bulk_create([*(row(one) for one in ids), row(UUID(int=1), days_ago=0)])
    # A few derived ids look like ids of the present or of the past, and go with their partition.
    whole = [(one.first, one.stop) for one in layout() if one.is_dropped_whole]
    inside = [one for one in ids if any(first <= one < stop for first, stop in whole if first and stop)]
    assert len(inside) < 10
    assert prune(-14 * DAY) == PruneCounts(inbox=300 - len(inside))
    assert InboxEntry.objects.count() == 1 + len(inside)


@pytest.mark.usefixtures("divided")
def test_partitions_are_made_two_weeks_ahead_and_take_the_rows_of_their_ids() -> None:
    now = datetime.now(UTC)
    ids = [id_of(now + days * DAY) for days in (14.6, 15.5, 40)]
    InboxEntry.objects.bulk_create(row(one, days_ago=0) for one in ids)
    before = layout()
    with closing(open_connection("default")) as opened:
        assert partitions.make_ahead(opened, now=now, width=DAY) <= 1
        assert partitions.make_ahead(opened, now=now + 2 * DAY, width=DAY) == 2
        assert partitions.make_ahead(opened, now=now + 2 * DAY, width=DAY) == 0
        # No pass has run for a hundred days.
        assert partitions.make_ahead(opened, now=now + 100 * DAY, width=DAY) == 14
    assert covers_all_ids(layout()) and len(layout()) >= len(before) + 16
    with connection.cursor() as cursor:
        cursor.execute("SELECT tableoid::regclass::text, message_id FROM outbox_inbox")
        found = {message_id: name for name, message_id in cursor.fetchall()}
    assert found.keys() == set(ids)
    assert all("outbox_inbox_time_" in name for name in found.values())


@pytest.mark.usefixtures("divided")
def test_many_rows_ahead_are_not_moved_and_still_go(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(partitions, "_MOST_ROWS", 2)
    now = datetime.now(UTC)
    InboxEntry.objects.bulk_create(row(id_of(now + 15.2 * DAY)) for _ in range(3))
    before = layout()
    with closing(open_connection("default")) as opened:
        assert partitions.make_ahead(opened, now=now + 3 * DAY, width=DAY) == 0
    assert layout() == before
    assert "has more than 2 rows" in caplog.text
    assert prune(-14 * DAY).inbox == 3


@pytest.mark.usefixtures("divided")
def test_a_handler_in_the_way_is_not_disturbed_and_the_next_pass_tries_again() -> None:
    """The pass gives up its lock, and what waited behind it goes on."""
    InboxEntry.objects.bulk_create([row(uuid7())])
    holding, done = threading.Event(), threading.Event()

    def handler() -> None:
        with closing(connections.create_connection("default")) as other:
            other.set_autocommit(False)
            with other.cursor() as cursor:
                cursor.execute("INSERT INTO outbox_inbox VALUES ('effects', 1, %s)", [uuid7()])
            holding.set()
            done.wait(60)
            other.commit()

    thread = threading.Thread(target=handler)
    thread.start()
    try:
        assert holding.wait(30)
        before = layout()
        assert prune() == PruneCounts()
        assert layout() == before
    finally:
        done.set()
        thread.join()
    assert prune().partitions > 0


# -- kills -------------------------------------------------------------------------------------------

KILLED_AT = [name for name in faults.POINTS if name.startswith("partition.")]
QUICK = ("partition.in_make", "partition.before_drop_commit")


def run_killed(point: str, work: Callable[[], object]) -> bool:
    """Run a piece of work in a child process that is killed at a point. Return whether it was."""
    connections.close_all()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            faults.arm(f"{point}=kill")
            work()
            status = 0
        finally:
            os._exit(status)
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    assert code in (0, -signal.SIGKILL), code
    return code != 0


@pytest.mark.usefixtures("inbox", "_effects")
@pytest.mark.parametrize(
    "point", [pytest.param(name, marks=[] if name in QUICK else [pytest.mark.slow]) for name in KILLED_AT]
)
def test_a_kill_at_any_step_loses_no_row_and_the_next_pass_completes_the_work(point: str) -> None:
    def everything() -> None:
        now = datetime.now(UTC)
        with closing(open_connection("default")) as opened:
            partitions.convert(opened, now=now - DAY / 2, width=DAY, patience_seconds=5)
            partitions.make_ahead(opened, now=now + 3 * DAY, width=DAY)
        prune()

    consume("one", "two")
    needed = set(InboxEntry.objects.values_list("message_id", flat=True))
    derived = row(uuid5(UUID(int=0), "x"), days_ago=-9)
    InboxEntry.objects.bulk_create([row(uuid7()), derived])
    assert len(needed) == 2
    assert run_killed(point, everything)
    parts = layout()
    assert parts == [] or covers_all_ids(parts)
    kept = {*needed, derived.message_id}
    assert set(InboxEntry.objects.values_list("message_id", flat=True)) >= kept
    deliver_all_again()
    assert not run_killed("producer.after_options", everything)
    assert set(InboxEntry.objects.values_list("message_id", flat=True)) == kept
    deliver_all_again()
    assert Effect.objects.count() == 2
    assert covers_all_ids(layout())


@pytest.mark.slow
@pytest.mark.usefixtures("divided", "_effects")
def test_handlers_at_the_boundary_of_two_partitions_take_effect_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Consumers run while partitions are made and dropped, and every queue is delivered again meanwhile."""
    keys = [str(number) for number in range(120)]
    stop = threading.Event()
    dropped: list[int] = []

    def passes() -> None:
        moment = datetime.now(UTC)
        while not stop.is_set():
            moment += DAY
            with closing(open_connection("default")) as opened:
                partitions.make_ahead(opened, now=moment, width=DAY)
            dropped.append(prune(moment - datetime.now(UTC)).partitions)

    thread = threading.Thread(target=passes)
    thread.start()
    try:
        for start in range(0, len(keys), 20):
            consume(*keys[start : start + 20])
            deliver_all_again()
        eventually(lambda: sum(dropped) >= 3)
    finally:
        stop.set()
        thread.join()
    deliver_all_again()
    assert sorted(Effect.objects.values_list("number", flat=True)) == sorted(keys)


# -- other readers -----------------------------------------------------------------------------------


@pytest.mark.usefixtures("divided", "_effects")
def test_a_rename_copies_the_rows_of_all_partitions() -> None:
    consume("one", "two")
    InboxEntry.objects.bulk_create(row(one) for one in (uuid4(), UUID(int=1)))
    known = set(InboxEntry.objects.values_list("message_id", flat=True))
    call_command("outbox_group", "rename", "effects", "renamed", "--no-input", stdout=StringIO())
    assert set(InboxEntry.objects.filter(group="renamed").values_list("message_id", flat=True)) == known


def test_a_partition_covers_a_fourteenth_of_the_retention(outbox_settings: Callable[..., None]) -> None:
    assert pruning.partition_width() == DAY
    outbox_settings(INBOX_RETENTION_SECONDS=3600)
    assert pruning.partition_width() == timedelta(minutes=10)
