"""Sagas: the hotel of docs/saga.md, step by step, backwards, and with processes killed at every step."""

from __future__ import annotations

import contextlib
import importlib
import itertools
import re
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import datetime, timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import psycopg
import pytest
from django.db import transaction
from django.utils import timezone

from outbox.contrib.django.database.aliases import alias_conninfo
from outbox.contrib.django.engine.broker import flush
from outbox.contrib.django.operations.installation import install_broker
from outbox.contrib.django.operations.personal_data import Scope
from outbox.contrib.django.operations.watching import look
from outbox.contrib.django.settings.conf import get_settings
from outbox.contrib.django.subscribers.registry import unregister_all
from outbox.contrib.django.worker.drain import drain
from outbox.contrib.saga import steps as saga
from outbox.contrib.saga.steps import Saga, SagaProgress, SagaState
from outbox.errors import ConfigurationError, TransactionUsageError, UsageError
from outbox.retry import RetryPolicy
from tests.broker.support import let_time_pass
from tests.django.conftest import RAISE_FLOORS
from tests.django.hotel.models import Booking, Room
from tests.django.processes import process
from tests.django.sessions import broker_connection
from tests.django.state import rolled_back
from tests.django.test_crash_workers import WORKERS
from tests.support import eventually

HERE: Final = Path(__file__).resolve().parent
PAGE: Final = HERE.parent.parent / "docs" / "saga.md"
TOPICS: Final[dict[str, Any]] = {
    "bookings": {"types": ["NORMAL", "DELAY", "TRANSACTION"], "queue_count": 2},
    **{name: {"queue_count": 1} for name in ("invoices", "refunds", "keys")},
}
SETTINGS: Final[dict[str, Any]] = {"TOPICS": TOPICS}
HALF_AN_HOUR: Final = 30 * 60


@pytest.fixture
def hotel(databases: None, no_subscribers: None, outbox_settings: Callable[..., None]) -> Iterator[SimpleNamespace]:
    """The example, with its steps registered, and a room."""
    outbox_settings(**SETTINGS)
    install_broker(get_settings())
    steps = importlib.reload(importlib.import_module("tests.django.hotel.saga"))
    services = importlib.reload(importlib.import_module("tests.django.hotel.services"))
    yield SimpleNamespace(
        saga=steps.booking, book=services.book, paid=services.paid, room=Room.objects.create(number="101")
    )
    Booking.objects.all().delete()
    SagaProgress.objects.all().delete()
    Room.objects.all().delete()


def told() -> Counter[str]:
    """The messages to the hotel's other services, by topic."""
    flush(within_seconds=10)
    with broker_connection() as (connection, schema):
        connection.execute("SELECT set_config('search_path', %s, false)", [schema])
        rows = connection.execute(
            "SELECT topic.name, op.decision::text FROM commit_log JOIN topic USING (topic_id)"
            " JOIN op_log op USING (transaction_id) WHERE topic.name <> 'bookings'"
        ).fetchall()
    return Counter(name for name, decision in rows if decision == "C")


def state_of(record: Booking) -> tuple[str, str, str]:
    record.refresh_from_db()
    progress = SagaProgress.objects.get(record=str(record.pk))
    return progress.state, progress.step, progress.reason


def is_free(room: Room) -> bool:
    room.refresh_from_db()
    return room.free


def time_passes(seconds: float) -> None:
    with broker_connection() as (connection, _):
        let_time_pass(connection, seconds)


def waiting_deadlines() -> int:
    with broker_connection() as (connection, _):
        found = connection.execute("SELECT count(*) FROM outbox.scheduled").fetchone()
    assert found is not None
    return int(found[0])


def test_forward_to_the_end(hotel: SimpleNamespace) -> None:
    record = hotel.book(hotel.room, "ada")
    drain()
    assert state_of(record) == (SagaState.WAITING, "ask_for_payment", "")
    assert (is_free(hotel.room), waiting_deadlines()) == (False, 1)
    assert hotel.paid(record.pk, 80)
    drain()
    assert state_of(record) == (SagaState.DONE, "issue_key", "")
    assert told() == {"invoices": 1, "keys": 1}
    assert waiting_deadlines() == 0, "the deadline is recalled"


def test_not_paid_in_time_gives_the_room_back(hotel: SimpleNamespace) -> None:
    record = hotel.book(hotel.room, "ada")
    drain()
    time_passes(HALF_AN_HOUR - 60)
    drain()
    assert state_of(record)[0] == SagaState.WAITING
    time_passes(120)
    drain()
    assert state_of(record) == (SagaState.UNDONE, "reserve_room", "ask_for_payment was not answered within 0:30:00")
    assert is_free(hotel.room)
    assert not hotel.paid(record.pk, 80)
    drain()
    assert told() == {"invoices": 1}


def test_a_deadline_that_was_not_recalled_finds_that_the_record_has_moved_on(hotel: SimpleNamespace) -> None:
    """The process died between its commit and the recall: on_commit functions are not run."""
    record = hotel.book(hotel.room, "ada")
    drain()
    with contextlib.suppress(KeyboardInterrupt), transaction.atomic():
        transaction.on_commit(interrupt)
        assert hotel.paid(record.pk, 80)
    drain()
    assert waiting_deadlines() == 1
    time_passes(HALF_AN_HOUR + 60)
    drain()
    assert state_of(record)[0] == SagaState.DONE
    assert told() == {"invoices": 1, "keys": 1}


def test_the_deadline_of_a_deleted_record_is_not_that_of_the_next_record_with_its_key(hotel: SimpleNamespace) -> None:
    """With a natural primary key, the same booking may be made again."""
    first = hotel.book(hotel.room, "ada")
    drain()
    first_id = first.pk
    first.delete()
    time_passes(HALF_AN_HOUR - 60)
    Room.objects.update(free=True)
    with transaction.atomic():
        again = Booking.objects.create(pk=first_id, room=hotel.room, guest="ada")
        hotel.saga.start(again)
    drain()
    assert state_of(again) == (SagaState.WAITING, "ask_for_payment", "")
    time_passes(120)
    drain()
    assert state_of(again) == (SagaState.WAITING, "ask_for_payment", ""), "its own half an hour is not over"
    time_passes(HALF_AN_HOUR)
    drain()
    assert state_of(again)[0] == SagaState.UNDONE


def interrupt() -> None:
    raise KeyboardInterrupt


def test_deadlines_are_each_records_own(hotel: SimpleNamespace) -> None:
    records = [hotel.book(Room.objects.create(number=str(number)), "ada") for number in range(3)]
    drain()
    assert waiting_deadlines() == 3
    assert hotel.paid(records[1].pk, 80)
    assert waiting_deadlines() == 2
    assert len({hotel.saga.deadline_key(record.pk, "ask_for_payment") for record in records}) == 3


def test_a_refused_step_undoes_what_was_before_it_and_not_itself(hotel: SimpleNamespace) -> None:
    first, second = (hotel.book(hotel.room, guest) for guest in ("ada", "bob"))
    drain()
    refused, kept = sorted((first, second), key=lambda record: state_of(record)[0] != SagaState.UNDONE)
    assert state_of(refused) == (SagaState.UNDONE, "reserve_room", "the room is taken")
    assert state_of(kept)[0] == SagaState.WAITING
    assert not is_free(hotel.room), "the room of the other one is not given back"


def test_a_late_refusal_undoes_all_in_reverse_and_an_erasure_erases_its_reason(hotel: SimpleNamespace) -> None:
    record = hotel.book(hotel.room, "nobody")
    drain()
    assert hotel.paid(record.pk, 80)
    drain()
    assert state_of(record) == (SagaState.UNDONE, "reserve_room", "there is no guest")
    assert told() == {"invoices": 1, "refunds": 1}
    assert is_free(hotel.room)
    assert record.charged == 0
    key = f"booking/{record.pk}"
    scope = Scope(topic="bookings", message_ids=(), transaction_ids=(), key=key, replacement=None, texts=())
    for other in (replace(scope, key=f"{key}1"), replace(scope, topic="others")):
        assert saga.erase_reasons(SagaProgress.objects.all(), other) == 0
    # Retention may have removed the messages from the log, and keeps the saga.
    assert saga.erase_reasons(SagaProgress.objects.all(), scope) == 1
    assert state_of(record) == (SagaState.UNDONE, "reserve_room", "(erased)")
    SagaProgress.objects.update(reason="there is no guest")
    [last] = SagaProgress.objects.values_list("message_id", flat=True)
    assert saga.erase_reasons(SagaProgress.objects.all(), replace(scope, key=None, message_ids=[last])) == 1


def test_a_reason_that_no_database_stores_undoes_all_the_same(hotel: SimpleNamespace) -> None:
    hostile, shown = "a NUL \x00 and half an emoji \ud83d", "a NUL \N{REPLACEMENT CHARACTER} and half an emoji ?"

    def refuse(record: Booking) -> None:
        raise saga.StepRefused(hostile)

    # The registered handler has this very step.
    object.__setattr__(hotel.saga._steps[-1], "work", refuse)
    by_step = hotel.book(hotel.room, "ada")
    drain()
    assert hotel.paid(by_step.pk, 80)
    drain()
    assert state_of(by_step) == (SagaState.UNDONE, "reserve_room", shown)
    assert is_free(hotel.room)
    by_answer = hotel.book(hotel.room, "bob")
    drain()
    assert hotel.saga.refuse(by_answer.pk, hostile, at="ask_for_payment")
    drain()
    assert state_of(by_answer) == (SagaState.UNDONE, "reserve_room", shown)
    assert is_free(hotel.room)


def test_an_answer_counts_once_and_only_where_it_is_waited_for(hotel: SimpleNamespace) -> None:
    record = hotel.book(hotel.room, "ada")
    assert not hotel.paid(record.pk, 80), "nothing was asked yet"
    drain()
    with rolled_back():
        assert hotel.paid(record.pk, 80)
    drain()
    assert (state_of(record)[0], waiting_deadlines()) == (SagaState.WAITING, 1), "a rolled back answer is none"
    assert hotel.saga.refuse(record.pk, "changed her mind", at="ask_for_payment")
    assert not hotel.paid(record.pk, 80)
    drain()
    assert state_of(record) == (SagaState.UNDONE, "reserve_room", "changed her mind")
    with pytest.raises(UsageError, match="no step 'pay'; use one of: reserve_room"):
        hotel.saga.proceed(record.pk, at="pay")


def test_it_starts_once_and_with_the_record(hotel: SimpleNamespace) -> None:
    record = Booking.objects.create(room=hotel.room, guest="ada")
    with pytest.raises(TransactionUsageError, match="inside the atomic"):
        hotel.saga.start(record)
    with transaction.atomic():
        hotel.saga.start(record)
    with pytest.raises(UsageError, match="started before"), transaction.atomic():
        hotel.saga.start(record)
    with rolled_back():
        dropped = Booking.objects.create(room=hotel.room, guest="bob")
        hotel.saga.start(dropped)
    drain()
    assert [one.guest for one in Booking.objects.all()] == ["ada"]


def test_no_write_to_the_record_changes_how_far_its_saga_is(hotel: SimpleNamespace) -> None:
    """A copy of the record that was read before the saga moved on is written back, in every way that Django has."""
    record = hotel.book(hotel.room, "ada")
    stale = Booking.objects.get(pk=record.pk)
    columns = [field.name for field in Booking._meta.concrete_fields if not field.primary_key]
    drain()
    stale.save()
    stale.save(update_fields=columns)
    Booking.objects.bulk_update([stale], columns)
    Booking.objects.filter(pk=stale.pk).update(**{name: getattr(stale, name) for name in columns})
    Booking.objects.update_or_create(pk=stale.pk, defaults={name: getattr(stale, name) for name in columns})
    assert hotel.paid(record.pk, 80), "it still waits for the payment"
    drain()
    assert state_of(record)[0] == SagaState.DONE


def test_an_answer_of_code_that_has_locked_the_record_waits_for_nothing(hotel: SimpleNamespace) -> None:
    """The record is locked before its saga, everywhere."""
    record = hotel.book(hotel.room, "ada")
    drain()
    with transaction.atomic():
        Booking.objects.select_for_update().get(pk=record.pk)
        with another_session() as other:
            other.execute("SET lock_timeout = '5s'")
            assert other.execute("SELECT 1 FROM outbox_saga FOR UPDATE NOWAIT").fetchall()
        assert hotel.paid(str(record.pk), 80)
    assert state_of(record)[0] == SagaState.RUNNING


def test_a_stalled_saga_is_named_and_continues(hotel: SimpleNamespace) -> None:
    """Of one whose step's message is lost, of one whose deadline's message is lost, and of one with a dead letter."""
    running, waiting = hotel.book(hotel.room, "ada"), hotel.book(Room.objects.create(number="102"), "bob")
    drain()
    lose_messages()
    assert stalled() == {}, "they wait for the payment, within the time"
    SagaProgress.objects.filter(record=str(waiting.pk)).update(late_at=long_ago())
    assert hotel.paid(running.pk, 80)
    lose_messages()
    SagaProgress.objects.filter(record=str(running.pk)).update(changed_at=long_ago())
    why = "the broker does not have the message of the saga"
    assert stalled() == {str(running.pk): why, str(waiting.pk): why}
    assert saga.mend() == {"published": 2}
    assert stalled() == {}
    drain()
    assert [state_of(record)[0] for record in (running, waiting)] == [SagaState.DONE, SagaState.UNDONE]


def test_a_process_that_has_not_imported_its_sagas_mends_them(
    hotel: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process of the role check calls no handler, so nothing else may have imported the subscribers."""
    hotel.book(hotel.room, "ada")
    lose_messages()
    SagaProgress.objects.update(changed_at=long_ago())
    known = dict(saga._sagas)
    monkeypatch.setattr(saga, "_sagas", {})
    monkeypatch.setattr(saga, "autodiscover", lambda: saga._sagas.update(known), raising=False)
    assert len(stalled()) == 1
    assert saga.mend() == {"published": 1}


def test_a_saga_whose_message_is_a_dead_letter_is_named_and_left_alone(hotel: SimpleNamespace) -> None:
    broken = Saga("broken", Booking, topic="bookings")

    @broken.step(retry=RetryPolicy(max_attempts=1))
    def fail(record: Booking) -> None:
        raise LookupError

    with transaction.atomic():
        record = Booking.objects.create(room=hotel.room, guest="ada")
        broken.start(record)
    drain()
    SagaProgress.objects.update(changed_at=long_ago())
    assert stalled() == {str(record.pk): "the message of the saga is a dead letter"}
    assert saga.mend() == {"published": 0}


def long_ago() -> datetime:
    return timezone.now() - timedelta(minutes=5)


def stalled() -> dict[str, str]:
    """The condition's evidence: record and reason."""
    found = [one for one in look().verdict.conditions if one.name == "saga_stalled"]
    return {str(fact["record"]): str(fact["why"]) for one in found for fact in one.evidence}


def lose_messages() -> None:
    """As a restore of the broker's database does."""
    flush(within_seconds=10)
    with broker_connection() as (connection, _):
        connection.execute(RAISE_FLOORS.encode())
        for table in ("consume_queue", "scheduled", "op_log", "commit_log"):
            connection.execute(f"DELETE FROM outbox.{table}")


def another_session() -> contextlib.AbstractContextManager[psycopg.Connection[Any]]:
    """Another session on the application's database."""
    return psycopg.connect(alias_conninfo("default"), autocommit=True)


def test_a_record_that_was_deleted_ends_its_saga(hotel: SimpleNamespace) -> None:
    hotel.book(hotel.room, "ada").delete()
    assert drain().failed == 0
    assert is_free(hotel.room)


def test_a_record_whose_key_was_given_in_another_form_has_one_saga(hotel: SimpleNamespace) -> None:
    """Django leaves a UUID as it was given to a new record, such as a text without hyphens."""
    with transaction.atomic():
        record = Booking.objects.create(room=hotel.room, guest="ada")
        number, record.pk = record.pk, f"0{record.pk}"
        hotel.saga.start(record)
    assert drain().failed == 0
    assert hotel.saga.progress(record.pk).state == SagaState.WAITING
    assert hotel.saga.deadline_key(record.pk, "pay") == hotel.saga.deadline_key(number, "pay")
    record.delete()
    assert not SagaProgress.objects.exists()


def test_a_saga_without_its_row_ends(hotel: SimpleNamespace) -> None:
    hotel.book(hotel.room, "ada")
    SagaProgress.objects.all().delete()
    assert drain().failed == 0
    assert is_free(hotel.room)


def test_mistakes_are_refused_when_they_are_declared() -> None:
    saga = Saga("wrong", Booking, topic="bookings")

    async def later(record: Booking) -> None: ...

    try:
        with pytest.raises(ConfigurationError, match="plain functions"):
            saga.step()(later)
        with pytest.raises(ConfigurationError, match="no steps"):
            saga.start(Booking())
        saga.step()(interrupt)
        with pytest.raises(ConfigurationError, match="declared twice"):
            saga.step()(interrupt)
    finally:
        unregister_all()


def test_a_step_that_returns_something_else_fails(hotel: SimpleNamespace) -> None:
    saga = Saga("odd", Booking, topic="bookings")

    def five(record: Booking) -> int:
        return 5

    saga.step()(five)
    with transaction.atomic():
        record = Booking.objects.create(room=hotel.room, guest="ada")
        saga.start(record)
    assert drain().failed == 1
    assert state_of(record)[0] == SagaState.RUNNING


# -- the document -----------------------------------------------------------------------------------


def test_the_document_shows_the_code_that_is_tested_here() -> None:
    shown = re.findall(r"^```python\n# hotel/(\w+)\.py\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert {name for name, _ in shown} == {"models", "saga", "services", "subscribers"}
    for name, block in shown:
        if name != "subscribers":
            code = (HERE / "hotel" / f"{name}.py").read_text().replace("tests.django.hotel", "hotel")
            assert code.partition("\n\n")[2] == block, f"docs/saga.md shows another hotel/{name}.py"


# -- kills ------------------------------------------------------------------------------------------

KILLS: Final = ("consumer.before_handler", "consumer.before_inbox_commit", "consumer.after_inbox_commit")


@pytest.mark.timeout(180)
@pytest.mark.slow
def test_killed_at_each_step_forward_and_backward(hotel: SimpleNamespace) -> None:
    """The process that runs a step is killed at it, for each step of a booking that is kept and of one that is not."""
    points = itertools.cycle(KILLS)
    with started("sequencer"), started("check"):
        kept = hotel.book(hotel.room, "ada")
        dropped = hotel.book(Room.objects.create(number="102"), "nobody")
        for _ in range(2):  # reserve_room and ask_for_payment of both, in any order
            killed_at(next(points))
        until(SagaState.WAITING, kept, dropped)
        for record in (kept, dropped):
            assert hotel.paid(record.pk, 80)
        for _ in range(3):  # issue_key of both, and what is undone of the second
            killed_at(next(points))
        until(SagaState.DONE, kept)
        until(SagaState.UNDONE, dropped)
    assert (is_free(kept.room), is_free(dropped.room)) == (False, True)
    assert told() == {"invoices": 2, "keys": 1, "refunds": 1}
    assert (kept.charged, dropped.charged) == (80, 0)


def started(name: str, faults: str = "") -> contextlib.AbstractContextManager[Any]:
    return process(WORKERS[name], outbox=SETTINGS, subscribers="hotel.saga", faults=faults, quiet=True)


def killed_at(point: str) -> None:
    with started("consumer", f"{point}=kill@1") as victim:
        assert victim.wait(60) == -signal.SIGKILL, point


def until(state: SagaState, *records: Booking) -> None:
    with started("consumer"):
        for record in records:
            eventually(partial(is_at, record, state), within_seconds=60, what=partial(str, record.pk))


def is_at(record: Booking, state: SagaState) -> bool:
    return state_of(record)[0] == state
