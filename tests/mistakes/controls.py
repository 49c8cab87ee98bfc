"""The parts that keep the promise, switched off one by one: the oracle must find each, or it proves nothing.

A control names the piece, how to switch it off, and the rules that are then broken in a world: by a specimen, and by
random programs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final
from uuid import UUID

import pytest
from django.db import connections
from django.db.backends.base.base import BaseDatabaseWrapper

from outbox import Answer, Check, Decision, Delivery, names
from outbox import message as messages
from outbox.broker.postgres import PostgresBroker
from outbox.contrib.django import publish
from outbox.contrib.django.database import effects
from outbox.contrib.django.database.transactions import BlockHalves, BlockWatch
from outbox.contrib.django.engine.broker import CurrentEngine
from outbox.contrib.django.publishing import checkback, decorators
from outbox.contrib.django.publishing import publish as publishing
from outbox.contrib.django.subscribers import claims, inbox, outside
from outbox.contrib.django.subscribers.inbox import InboxEntries
from outbox.contrib.django.subscribers.shared_transaction import SharedTransaction
from outbox.contrib.unique import keys
from outbox.transaction import HalfTransaction
from tests.mistakes.generator import Side
from tests.mistakes.interpreter import Mistake
from tests.mistakes.oracle import Kind
from tests.mistakes.worlds import ATOMIC, SQLITE, TWO_PHASE, World

Switch = Callable[[pytest.MonkeyPatch], None]


@dataclass(frozen=True)
class Control:
    """With `switch` thrown, the specimen and some random program of `side` break `kind` in `world`."""

    name: str
    switch: Switch
    specimen: str
    side: Side
    world: World
    kind: Kind

    def __str__(self) -> str:
        return f"{self.name} [{self.world}]"


# -- the mends, to be switched off ------------------------------------------------------------------


def let_statements_pass(patch: pytest.MonkeyPatch) -> None:
    """Raw COMMIT and ROLLBACK are executed also where a message is bound to the block."""
    patch.setattr(BlockWatch, "bind", lambda watch, what: None)


def accept_any_transaction(patch: pytest.MonkeyPatch) -> None:
    """publish() does not look whether a live transaction carries it."""
    patch.setattr(BlockWatch, "what_ended", lambda watch: "")


def no_last_look_of_the_decorator(patch: pytest.MonkeyPatch) -> None:
    """@transactional_message does not read its row again before COMMIT."""
    let_statements_pass(patch)
    patch.setattr(decorators, "confirm_before_commit", lambda *args: None)
    patch.setattr(decorators, "require_marked", lambda *args: None)


def no_last_look_of_the_handler(patch: pytest.MonkeyPatch) -> None:
    """The inbox does not read its row again before COMMIT."""
    let_statements_pass(patch)
    patch.setattr(InboxEntries, "confirm", lambda *args: None)


def a_failed_handler_stays_in_the_inbox(patch: pytest.MonkeyPatch) -> None:
    """An attempt that committed its inbox row by hand and then failed counts as handled at the next delivery."""
    let_statements_pass(patch)
    patch.setattr(InboxEntries, "still_there", lambda *args: set())


def trust_the_text_of_an_error(patch: pytest.MonkeyPatch) -> None:
    """The text of a handler's error is made by str(), which may raise after the handler has run COMMIT."""
    let_statements_pass(patch)
    patch.setattr(inbox, "error_line", lambda error: f"{type(error).__name__}: {error}")


def report_every_commit(patch: pytest.MonkeyPatch) -> None:
    """After a plain atomic() COMMIT is reported without a look into the ledger."""
    patch.setattr(publishing, "_in_ledger", lambda connection, halves: set(halves.ids))


def an_absent_row_is_a_rollback(patch: pytest.MonkeyPatch) -> None:
    """A ledger row that is not there is reported as ROLLBACK."""

    def after_commit(
        connection: BaseDatabaseWrapper, current: CurrentEngine, half: HalfTransaction, halves: BlockHalves
    ) -> None:
        is_there = half.transaction_id in publishing._in_ledger(connection, halves)
        publishing.end_soon(current.broker, half, Decision.COMMIT if is_there else Decision.ROLLBACK)

    patch.setattr(publishing, "_after_commit", after_commit)


def every_exception_is_a_rollback(patch: pytest.MonkeyPatch) -> None:
    """The decorator reports ROLLBACK although its connection has left the transaction that wrote the row."""
    let_statements_pass(patch)
    patch.setattr(decorators, "_is_rolled_back", lambda *args: True)


def take_no_key(patch: pytest.MonkeyPatch) -> None:
    """No row holds a unique key."""
    patch.setattr(keys, "reserve", lambda connection, messages: {})


def hold_keys_of_rolled_back_messages(patch: pytest.MonkeyPatch) -> None:
    """The row of a unique key commits on its own, so a rollback does not free the key."""
    reserve = keys.reserve

    def reserve_elsewhere(connection: BaseDatabaseWrapper, messages: Sequence[keys.KeyRequest]) -> dict[UUID, UUID]:
        # This alias names the same database.
        other = connections["other"]
        with other.cursor() as cursor:
            cursor.execute("SET lock_timeout = '20ms'")
        return reserve(other, messages)

    patch.setattr(keys, "reserve", reserve_elsewhere)


def let_writes_pass(patch: pytest.MonkeyPatch) -> None:
    """A handler with effects="outside" may write anywhere."""
    patch.setattr(effects, "refuse", lambda what: None)


def done_without_a_look(patch: pytest.MonkeyPatch) -> None:
    """A handler with effects="outside" that returns is done, whatever errors it has caught."""

    def complete(attempt: outside._Attempt, delivery: Delivery) -> None:
        if attempt.progress is outside._Progress.OPEN:
            attempt.refusals.first = None
            with attempt.finish(delivery):
                pass

    patch.setattr(outside._Attempt, "complete", complete)


def find_no_step(patch: pytest.MonkeyPatch) -> None:
    """The results of steps are stored, and not read."""
    patch.setattr(claims, "find_step", lambda *args: None)


def repeat_with_the_same_body(patch: pytest.MonkeyPatch) -> None:
    """A repeated call gets the objects of the first call."""
    patch.setattr(inbox, "afresh", list)


def repeat_in_the_same_context(patch: pytest.MonkeyPatch) -> None:
    """A repeated call runs with the context variables of the first call."""
    patch.setattr(inbox._Call, "attempt", inbox._Call._run)


def join_in_the_same_context(patch: pytest.MonkeyPatch) -> None:
    """A message that joins a transaction runs with the context variables of the messages before it."""

    def extend(shared: SharedTransaction, handle: Callable[[Delivery], Exception | None]) -> None:
        while shared._may_go_on() and shared._join_next(handle):
            pass

    patch.setattr(SharedTransaction, "extend", extend)


def take_every_text(patch: pytest.MonkeyPatch) -> None:
    """publish() does not look whether the database can store a text."""
    patch.setattr(names, "is_text", lambda value: True)


def take_every_time(patch: pytest.MonkeyPatch) -> None:
    """publish() does not look whether Python and the database can hold a time."""
    patch.setattr(messages, "_check_deliver_at", lambda topic, moment: None)


def keep_every_session(patch: pytest.MonkeyPatch) -> None:
    """A connection stays open although a handler has changed its session."""
    patch.setattr(inbox, "is_session_changed", lambda connection: False)


_LEFTOVERS: Final[tuple[tuple[str, Switch, str, Side], ...]] = (
    ("a body for each call", repeat_with_the_same_body, "a changed body and a conflict", "consumer"),
    ("a context for each call", repeat_in_the_same_context, "an activated language and a conflict", "consumer"),
    ("a context for each message", join_in_the_same_context, "an activated time zone before other messages", "sharing"),
    (
        "a session for the next message",
        keep_every_session,
        "a changed session before a failure outside of a transaction",
        "outside",
    ),
)

MENDS: Final = (
    *(
        Control(part, switch, specimen, "producer", world, Kind.ALTERED)
        for world in (TWO_PHASE, ATOMIC)
        for part, switch, specimen in [
            ("hostile texts are refused", take_every_text, "hostile key: NUL"),
            ("hostile times are refused", take_every_time, "hostile time: before year 1"),
        ]
    ),
    *(
        Control(f"leftovers, {part}", switch, specimen, side, world, Kind.LEFTOVER)
        for world in (TWO_PHASE, SQLITE)
        for part, switch, specimen, side in _LEFTOVERS
        if world is TWO_PHASE or side != "sharing"
    ),
    *(
        Control(part, switch, specimen, "outside", world, kind)
        for world in (TWO_PHASE, ATOMIC, SQLITE)
        for part, switch, specimen, kind in [
            ("writes outside of finish are refused", let_writes_pass, "a write outside of finish", Kind.STRAY),
            (
                "the look at caught errors",
                done_without_a_look,
                "a handler that catches the error of finish",
                Kind.NO_EFFECT,
            ),
            ("results of steps", find_no_step, "a step before a failure", Kind.REPEATED),
        ]
    ),
    *(
        Control(f"unique keys, {part}", switch, specimen, "producer", world, Kind.UNIQUE)
        for world in (TWO_PHASE, ATOMIC)
        for part, switch, specimen in [
            ("taken", take_no_key, "two messages of one unique key"),
            ("freed", hold_keys_of_rolled_back_messages, "a unique key after a rollback"),
        ]
    ),
    Control("unique keys on SQLite", take_no_key, "two messages of one unique key", "producer", SQLITE, Kind.UNIQUE),
    Control(
        "publish refuses a dead transaction",
        accept_any_transaction,
        "ROLLBACK before publish",
        "producer",
        SQLITE,
        Kind.UNREFUSED,
    ),
    *(
        Control("the decorator's last look", no_last_look_of_the_decorator, specimen, "producer", world, Kind.SILENT)
        for specimen, world in [
            ("a swallowed error in a decorated function", TWO_PHASE),
            ("a swallowed error in a decorated function", ATOMIC),
            ("ROLLBACK; BEGIN in a decorated function", SQLITE),
        ]
    ),
    *(
        Control("the handler's last look", no_last_look_of_the_handler, specimen, "consumer", world, Kind.NO_EFFECT)
        for specimen, world in [
            ("a handler with a swallowed error", TWO_PHASE),
            ("a handler with a swallowed error", ATOMIC),
            ("a handler with ROLLBACK; BEGIN", SQLITE),
        ]
    ),
    *(
        Control(
            "a failed handler leaves the inbox",
            a_failed_handler_stays_in_the_inbox,
            "a handler with COMMIT and an exception",
            "consumer",
            world,
            Kind.NO_EFFECT,
        )
        for world in (TWO_PHASE, SQLITE)
    ),
    Control(
        "a broken exception is described",
        trust_the_text_of_an_error,
        "a handler with COMMIT and a broken exception",
        "consumer",
        TWO_PHASE,
        Kind.NO_EFFECT,
    ),
    Control(
        "COMMIT is reported for a row that is there",
        report_every_commit,
        "a swallowed error after publish",
        "producer",
        TWO_PHASE,
        Kind.PHANTOM,
    ),
    *(
        Control(
            "an absent row is a hint",
            an_absent_row_is_a_rollback,
            "savepoint_rollback after publish",
            "producer",
            world,
            Kind.GUESSED,
        )
        for world in (TWO_PHASE, SQLITE)
    ),
    *(
        Control(
            "ROLLBACK from inside the transaction only",
            every_exception_is_a_rollback,
            "COMMIT; BEGIN and an exception in a decorated function",
            "producer",
            world,
            Kind.LOST,
        )
        for world in (TWO_PHASE, SQLITE)
    ),
)


# -- what the promise rests on anyway ---------------------------------------------------------------


def send_at_once(patch: pytest.MonkeyPatch) -> None:
    """publish() does not join the transaction."""
    patch.setattr(publishing, "connection_to_join", lambda using: None)
    patch.setattr(publishing, "refuse_without_transaction", lambda *given: None)


def lose_and_roll_back(patch: pytest.MonkeyPatch) -> None:
    """End messages are lost and check-back answers ROLLBACK without asking the ledger."""

    class Careless:
        def check_local_transactions(self, checks: Sequence[Check]) -> Iterable[Answer]:
            return [Answer(transaction_id=check.transaction_id, decision=Decision.ROLLBACK) for check in checks]

    patch.setattr(PostgresBroker, "end_one_way", lambda self, end: None)
    patch.setattr(checkback, "LedgerChecker", Careless)


def publish_twice(patch: pytest.MonkeyPatch) -> None:
    """Every message is published twice."""

    def twice(*args: Any, **options: Any) -> None:
        publish(*args, **options)
        publish(*args, **options)

    patch.setattr("tests.mistakes.interpreter.publish", twice)


def forget_what_was_handled(patch: pytest.MonkeyPatch) -> None:
    """The inbox is written, but takes every message for a new one."""
    enter = InboxEntries.enter

    def enter_again(entries: InboxEntries, deliveries: Sequence[Delivery], **seconds: float) -> list[Delivery]:
        enter(entries, deliveries, **seconds)
        return list(deliveries)

    patch.setattr(InboxEntries, "enter", enter_again)


def refuse_every_message(patch: pytest.MonkeyPatch) -> None:
    """The inbox cannot be written."""

    def refuse(*args: Any, **options: Any) -> None:
        raise Mistake

    patch.setattr(InboxEntries, "enter", refuse)


FOUNDATIONS: Final = (
    Control("publish joins", send_at_once, "an exception after publish", "producer", TWO_PHASE, Kind.PHANTOM),
    Control("check-back asks", lose_and_roll_back, "nothing wrong", "producer", TWO_PHASE, Kind.LOST),
    Control("one message", publish_twice, "nothing wrong", "producer", TWO_PHASE, Kind.DOUBLE),
    Control(
        "the inbox knows", forget_what_was_handled, "a handler without mistakes", "consumer", TWO_PHASE, Kind.TWICE
    ),
    Control("the inbox takes", refuse_every_message, "a handler without mistakes", "consumer", TWO_PHASE, Kind.STUCK),
)

CONTROLS: Final = (*MENDS, *FOUNDATIONS)
