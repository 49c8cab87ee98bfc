"""Runs programs against real databases, and notes what they saw."""

from __future__ import annotations

import contextlib
import json
import sqlite3
import threading
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar, copy_context
from dataclasses import replace
from typing import Any, Final

import psycopg
from django.conf import settings
from django.db import connections, transaction
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.utils import DataError, OperationalError
from django.utils import timezone, translation

from outbox import Delivery, Message, SendReceipt
from outbox.codec import JsonCodec
from outbox.contrib.django import ClaimedDelivery, publish, publish_many, subscriber, transactional_message
from outbox.contrib.django.subscribers.inbox import InboxInvoker
from outbox.contrib.django.subscribers.outside import HandlerInvoker
from outbox.contrib.django.subscribers.registry import Subscriber, subscribers
from outbox.contrib.unique import Unique
from outbox.errors import PermanentError, UsageError
from outbox.ports import Disposition, RunAlone
from outbox.subscription import Effects
from outbox.utils import log_context
from outbox.utils.ids import uuid7
from outbox.utils.safe_text import error_line
from tests.django.sharing import Waiting
from tests.django.shop.models import Effect as EffectRow
from tests.django.shop.models import Order, Payment
from tests.django.state import savepoint
from tests.mistakes import grammar
from tests.mistakes.grammar import HELD, Block, Consumer, Producer, Program, Step
from tests.mistakes.others import DUPLICATE, HELD_KEY, LOCKED, Others, is_alive, tidy
from tests.mistakes.traces import AttemptSeen, PairSeen, Sent, Trace
from tests.mistakes.values import HOSTILE, KEY_END

# No program publishes to this topic: the interpreter makes the deliveries for the handlers.
HANDLED_TOPIC: Final = "payments"

BODY: Final = {"amount": 1}
_CODEC: Final = JsonCodec()
_OF_THE_DRIVER: Final = (DataError, psycopg.DataError, ArithmeticError, TypeError, ValueError)

# What a handler may leave behind. In the session it is a parameter on PostgreSQL, and a pragma on SQLite.
_variable: Final[ContextVar[str]] = ContextVar("mistakes", default="")
_SET: Final = {"postgresql": "SET app.left_behind = '1'", "sqlite": "PRAGMA recursive_triggers = 1"}
_SHOW: Final = {
    "postgresql": "SELECT coalesce(current_setting('app.left_behind', true), '') = '1'",
    "sqlite": "PRAGMA recursive_triggers",
}


class Mistake(Exception):
    """What an application raises."""


class Broken(Mistake):
    """An exception whose text is a number."""

    def __str__(self) -> str:
        return 5  # type: ignore[return-value]


def run(program: Program, name: str, others: Others) -> Trace:
    """Run a program to its end, whatever it raises. `name` makes its rows and messages its own."""
    trace = Trace(name=name, program=program)
    interpreter = _Interpreter(others, trace)
    try:
        if isinstance(program, Producer):
            interpreter.body(program.body)
        else:
            _consume(program, interpreter)
    except Exception as error:
        trace.ended_with = error_line(error)
    tidy(connections[others.alias])
    return trace


class _Interpreter:
    def __init__(self, others: Others, trace: Trace) -> None:
        self.others = others
        self.alias = others.alias
        self.trace = trace
        self.prefix = trace.name
        self.attempt = AttemptSeen()
        # The delivery of a handler with effects="outside", and how many blocks are open that may write.
        self.given: ClaimedDelivery | None = None
        self._writable = 0
        self._rows = 0
        # The bodies that the running call has got.
        self.bodies: list[dict[str, int]] = []

    @property
    def connection(self) -> BaseDatabaseWrapper:
        return connections[self.alias]

    def body(self, steps: Sequence[Step]) -> None:
        for step in steps:
            if isinstance(step, Block):
                self._block(step)
            else:
                self._single(step)

    def _single(self, step: Step) -> None:
        match step:
            case grammar.Pair():
                self._pair(step)
            case grammar.Many():
                self._many(step)
            case grammar.Write():
                self._rows += 1
                self._row(f"{self.prefix}.w{self._rows}", step.raw)
            case grammar.Effect():
                self._effect(step.part)
            case grammar.Fail():
                self._fail(step.how)
            case grammar.Leave():
                self._leave(step.what)
            case grammar.Sql():
                self._by_hand(step)
            case grammar.SetRollback():
                transaction.set_rollback(True, using=self.alias)
            case grammar.Close():
                self._close()
            case grammar.Kill():
                self.others.kill(self.connection)
            case grammar.Raise(exits=True):
                raise SystemExit
            case grammar.Raise(broken=True):
                raise Broken
            case _:
                raise Mistake

    def _close(self) -> None:
        raw = self.connection.connection
        if raw is not None and self.connection.vendor == "sqlite":
            # Else the closed connection would keep its lock until the last of its cursors is collected.
            raw.rollback()
        self.connection.close()

    def _execute(self, statement: str, parameters: Sequence[Any] | None = None) -> None:
        with self.connection.cursor() as cursor:
            cursor.execute(statement, parameters)

    def _row(self, number: str, raw: bool) -> None:
        if (
            self.given is not None
            and not self._writable
            and number != DUPLICATE
            and threading.current_thread() is threading.main_thread()
        ):
            self.trace.strays.append(number)
        if raw:
            self._execute("INSERT INTO shop_order (number, status) VALUES (%s, 'new')", [number])
        else:
            Order.objects.using(self.alias).create(number=number)

    def _pair(self, step: grammar.Pair) -> None:
        seen = PairSeen(key=f"{self.prefix}.{step.number}", row_first=step.row_first)
        self._beside_rows([seen], [step.unique], step.raw, lambda using: [self._publish(seen, using, step.hostile)])

    def _many(self, step: grammar.Many) -> None:
        seen = [
            PairSeen(key=f"{self.prefix}.{step.number}.{place}", row_first=step.row_first)
            for place in range(len(step.unique))
        ]

        def publish_all(using: str | None) -> Sequence[SendReceipt | None]:
            options: list[Any] = []
            if seen[0].unique:
                options = [lambda body: Unique(body["unique"], within=3600)]
            bodies = [{"key": one.key, "unique": one.unique} for one in seen]
            return publish_many(
                "orders", bodies, *options, key=lambda body: body["key"], using=using, at_once=using is None
            )

        self._beside_rows(seen, step.unique, False, publish_all)

    def _publish(self, seen: PairSeen, using: str | None, hostile: str) -> SendReceipt | None:
        given: dict[str, Any] = {"body": {}, "key": "", **(HOSTILE[hostile] if hostile else {})}
        given["key"] = f"{seen.key}{KEY_END}{given['key']}" if hostile else seen.key
        topic = "reminders" if "deliver_at" in given else "orders"
        try:
            body = given.pop("body")
            receipt = publish(topic, body, *_options(seen.unique), **given, using=using, at_once=using is None)
        except Exception as error:
            # What only the driver notices comes late: the statement has aborted the transaction of the program.
            is_foreign = isinstance(error.__cause__ or error, _OF_THE_DRIVER) and not isinstance(error, UsageError)
            seen.foreign = error_line(error) if is_foreign else ""
            raise
        if hostile:
            decoded = _CODEC.decode(_CODEC.encode(body))
            seen.sent = Sent(given["key"], given.get("tag", ""), given.get("headers", {}), decoded)
        return receipt

    def _beside_rows(
        self,
        seen: Sequence[PairSeen],
        unique: Sequence[int],
        raw: bool,
        call: Callable[[str | None], Sequence[SendReceipt | None]],
    ) -> None:
        """Publish messages directly beside their rows, in one call."""
        self.trace.pairs += seen
        row_first, in_block = seen[0].row_first, self.connection.in_atomic_block
        # SQLite has one writer, and that may be the thread that waits for this one.
        lone_thread = self.connection.vendor == "sqlite" and threading.current_thread() is not threading.main_thread()
        if in_block and HELD in unique and self.connection.vendor == "postgresql":
            self._execute("SET LOCAL lock_timeout = '20ms'")
        for one in seen if row_first and not lone_thread else ():
            self._row(one.key, raw)
        alive = is_alive(self.connection)
        for one, number in zip(seen, unique, strict=True):
            one.in_block, one.alive = in_block, alive
            one.unique = self._unique(number) if in_block else ""
        # Outside of a block with at_once, and without `using`, like an application with only one database to think of.
        receipts = call(self.alias if in_block else None)
        for one, receipt in zip(seen, receipts, strict=True):
            one.returned = True
            # The control "one message" replaces publish by a function without a result.
            one.duplicate_of = receipt.duplicate_of if receipt is not None else None
        for one in seen if not row_first and not lone_thread else ():
            self._row(one.key, raw)

    def _unique(self, number: int) -> str:
        """A key that all attempts of the program share, or the key that another session holds."""
        if number == HELD:
            return HELD_KEY
        return f"{self.trace.name}.u{number}" if number else ""

    def _effect(self, part: int) -> None:
        for key in self.trace.keys:
            number = f"{key}/{part}/{len(self.trace.attempts)}"
            EffectRow.objects.using(self.alias).create(number=number)
        self.attempt.effects.append((part, self.attempt.committed_by_hand))

    def _fail(self, how: grammar.FailKind) -> None:
        match how:
            case "select":
                self._execute("SELECT 1 / 0")
            case "table":
                self._execute("SELECT * FROM missing_table")
            case "unique" | "raw unique":
                self._row(DUPLICATE, raw=how == "raw unique")
            case "statement timeout":
                self._execute("SET LOCAL statement_timeout = 1")
                # Outside of a transaction the limit is none, and this takes its time.
                self._execute("SELECT pg_sleep(0.05)")
            case "lock timeout":
                # The limit travels with the statement, so that it holds outside of a transaction too.
                self._execute(
                    "WITH setting AS MATERIALIZED (SELECT set_config('lock_timeout', '1', true) AS value) "
                    "SELECT 1 FROM shop_order, setting WHERE number = %s AND value IS NOT NULL "
                    "FOR UPDATE OF shop_order",
                    [LOCKED],
                )
            case "nowait":
                Order.objects.using(self.alias).select_for_update(nowait=True).get(number=LOCKED)
            case "conflict":
                self._conflict()
            case "constraint at commit":
                Payment.objects.using(self.alias).create(reference=DUPLICATE)

    def _conflict(self) -> None:
        if self.attempt.has_conflicted:
            return
        self.attempt.has_conflicted = True
        if self.connection.vendor == "sqlite":
            error = sqlite3.OperationalError("database is locked")
            error.sqlite_errorcode = sqlite3.SQLITE_BUSY
            raise OperationalError("database is locked") from error
        self._execute("DO $$ BEGIN RAISE EXCEPTION 'conflict' USING ERRCODE = '40001'; END $$")

    def _leave(self, what: grammar.LeaveKind) -> None:
        match what:
            case "body":
                for one in self.bodies:
                    one["amount"] += 1
            case "language":
                translation.activate("de")
            case "time zone":
                timezone.activate("Asia/Tokyo")
            case "variable":
                _variable.set("left")
            case "session":
                self._execute(_SET[self.connection.vendor])

    def look(self, deliveries: Sequence[Delivery]) -> None:
        """Note what a call of a handler meets of earlier calls."""
        self.bodies = [one.body for one in deliveries]
        met = {
            "a changed body": any(body != BODY for body in self.bodies),
            "a language": translation.get_language() != settings.LANGUAGE_CODE,
            "a time zone": timezone.get_current_timezone_name() != settings.TIME_ZONE,
            "a variable": bool(_variable.get()),
        }
        with self.connection.cursor() as cursor:
            cursor.execute(_SHOW[self.connection.vendor])
            met["a changed session"] = bool(cursor.fetchone()[0])
        self.trace.leftovers += [what for what, is_met in met.items() if is_met]

    def _by_hand(self, step: grammar.Sql) -> None:
        # SQLite takes one statement at a time.
        for statement in step.text.split("; ") if self.connection.vendor == "sqlite" else [step.text]:
            if step.driver:
                self.connection.ensure_connection()
                self.connection.connection.execute(statement)
            else:
                self._execute(statement)
            # Not where it was refused.
            self.attempt.by_hand = True
            self.attempt.committed_by_hand |= "COMMIT" in statement
            self.trace.committed_after_refusal |= "COMMIT" in statement and any(
                pair.in_block and not pair.returned for pair in self.trace.pairs
            )

    def _block(self, step: Block) -> None:
        match step:
            case grammar.Try():
                with contextlib.suppress(BaseException if step.all else Exception):
                    self.body(step.body)
            case grammar.StepCall():
                self._step_call(step)
            case grammar.Finish():
                self._finish(step)
            case grammar.Atomic():
                with transaction.atomic(using=self.alias, savepoint=step.savepoint):
                    self.body(step.body)
            case grammar.Decorated():
                self._decorated(step)
            case grammar.Savepoint():
                self._savepoint(step)
            case grammar.Pipeline():
                self.connection.ensure_connection()
                with self.connection.connection.pipeline():
                    self.body(step.body)
            case grammar.OnCommit():
                transaction.on_commit(lambda: self.body(step.body), using=self.alias)
            case _:
                self._thread(step)

    def _step_call(self, step: grammar.StepCall) -> None:
        assert self.given is not None

        def work() -> object:
            self.attempt.steps.append((step.name, "called"))
            with self._writing():
                self.body(step.body)
            return object() if step.odd else 1

        self.given.step(step.name, work, once=step.once)
        self.attempt.steps.append((step.name, "returned"))

    def _finish(self, step: grammar.Finish) -> None:
        assert self.given is not None
        self.attempt.reached_finish = self.attempt.reached_finish or step.is_main
        with self.given.finish(), self._writing():
            self.body(step.body)
        self.attempt.finishes.append(step.is_main)

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        self._writable += 1
        try:
            yield
        finally:
            self._writable -= 1

    def _decorated(self, step: grammar.Decorated) -> None:
        seen = PairSeen(f"{self.prefix}.{step.number}", decorated=True, in_block=True, row_first=step.last)
        seen.unique = self._unique(step.unique)
        self.trace.pairs.append(seen)
        outermost = not self.connection.in_atomic_block
        means_to_commit = False

        def work() -> None:
            nonlocal means_to_commit
            if not step.last:
                seen.returned = True
                self._row(seen.key, raw=False)
            self.body(step.body)
            if step.last:
                self._row(seen.key, raw=False)
                seen.alive = is_alive(self.connection)
            means_to_commit = not self.connection.needs_rollback

        body: Any = (lambda result: {}) if step.last else {}
        decorate = transactional_message("orders", *_options(seen.unique), key=seen.key, body=body, using=self.alias)
        decorate(work)()
        seen.returned = True
        seen.claims_commit = outermost and means_to_commit

    def _savepoint(self, step: grammar.Savepoint) -> None:
        sid: Any = savepoint(using=self.alias)
        try:
            self.body(step.body)
        except Exception:
            transaction.savepoint_rollback(sid, using=self.alias)
            if step.always:
                raise
        else:
            end: Callable[..., None] = transaction.savepoint_rollback if step.always else transaction.savepoint_commit
            end(sid, using=self.alias)

    def _thread(self, step: Block) -> None:
        def work() -> None:
            try:
                with contextlib.suppress(Exception):
                    if self.connection.vendor == "postgresql":
                        # The other thread's transaction may hold a unique key, and that thread waits for this one.
                        self._execute("SET lock_timeout = '20ms'")
                    self.body(step.body)
            finally:
                connections.close_all()

        thread = threading.Thread(target=work)
        thread.start()
        thread.join()


def _options(unique: str) -> list[Unique]:
    return [Unique(unique, within=3600)] if unique else []


# -- the consumer's side ----------------------------------------------------------------------------


def _consume(program: Consumer, interpreter: _Interpreter) -> None:
    """Deliver until it counts as handled, then once more, as a lost offset would."""
    trace = interpreter.trace
    trace.keys = [f"{trace.name}.d{index}" for index in range(program.batch)]
    group = "outside" if program.outside else "single" if program.batch == 1 else "batch"
    deliveries = [_delivery(key, group, offset) for offset, key in enumerate(trace.keys)]
    with _handling(group, interpreter) as deliver:
        if program.place is not None:
            _share(program, program.place, deliver, deliveries[0])
            if trace.attempts[-1].counts_as_handled:
                deliver(program, deliveries)
                return
        for _ in range(len(program.attempts) + 2):
            if trace.attempts and trace.attempts[-1].given_up:
                return
            if deliver(program, deliveries):
                deliver(program, deliveries)
                return


def _delivery(key: str, group: str, offset: int = 0) -> Delivery:
    message = Message(topic=HANDLED_TOPIC, body=json.dumps(BODY).encode(), key=key, message_id=uuid7())
    return _decoded(
        Delivery(message=message, body=None, group=group, queue=f"{HANDLED_TOPIC}/0", offset=offset, _decode=_decode)
    )


def _decode(message: Message) -> Any:
    return json.loads(message.body)


def _decoded(delivery: Delivery) -> Delivery:
    """A delivery as an engine makes it for each call."""
    return replace(delivery, body=_decode(delivery.message))


def _share(program: Consumer, place: int, deliver: _Deliver, delivery: Delivery) -> None:
    """Deliver the message in a transaction that it shares with three messages whose handlers make no mistakes."""
    name = deliver.interpreter.trace.name
    others = [_delivery(f"{name}.o{number}", delivery.group) for number in range(3)]
    deliver.interpreter.trace.others = [other.key for other in others]
    together = [*others[:place], delivery, *others[place:]]
    deliver.begin(program)
    results = deliver.share(together)
    mine = results.pop(place)
    deliver.end([mine])
    for other, result in zip(others, results, strict=True):
        for _ in range(5):
            if isinstance(result, Disposition):
                break
            [result] = deliver.alone([other])
        else:
            raise AssertionError(f"{other.key} was not handled: {result!r}")


class _Deliver:
    """Calls the handler of a program, and notes each attempt."""

    def __init__(self, interpreter: _Interpreter) -> None:
        self.interpreter = interpreter
        self.steps: tuple[Step, ...] = ()
        self.registered: Subscriber | None = None
        self._invoker = InboxInvoker()
        # The number of attempts of the program, where an attempt that is repeated alone counts once.
        self._begun = 0

    def __call__(self, program: Consumer, deliveries: Sequence[Delivery]) -> bool:
        self.begin(program)
        return self.end(self.alone(deliveries))

    def begin(self, program: Consumer) -> None:
        interpreter, trace = self.interpreter, self.interpreter.trace
        interpreter.attempt = AttemptSeen(reached_finish=False if program.outside else None)
        trace.attempts.append(interpreter.attempt)
        interpreter.prefix = f"{trace.name}.a{len(trace.attempts)}"
        self.steps = program.attempts[self._begun] if self._begun < len(program.attempts) else program.clean
        self._begun += 1

    def end(self, results: Sequence[Any]) -> bool:
        seen = self.interpreter.attempt
        seen.error = next((error_line(item) for item in results if isinstance(item, BaseException)), "")
        seen.counts_as_handled = all(isinstance(item, Disposition) for item in results)
        seen.given_up = any(isinstance(item, PermanentError) for item in results)
        seen.skipped = all(item is Disposition.SKIPPED for item in results)
        if RunAlone.RUN_ALONE in results:
            # The next attempt is this one once more.
            self._begun -= 1
        return seen.counts_as_handled

    def alone(self, deliveries: Sequence[Delivery]) -> list[Any]:
        assert self.registered is not None
        given = [_decoded(one) for one in deliveries]
        # A thread of a consumer calls the invoker in this way, too.
        with log_context.handling(given):
            return copy_context().run(self._alone, self.registered, given)

    def _alone(self, registered: Subscriber, deliveries: Sequence[Delivery]) -> list[Any]:
        if registered.subscription.effects is Effects.OUTSIDE:
            return [self._claim(registered, deliveries[0])]
        return list(self._invoker(registered.subscription, registered.handler, deliveries, generation=1))

    def _claim(self, registered: Subscriber, delivery: Delivery) -> object:
        def claimed(term_seconds: float) -> None:
            pass

        subscription, handler = registered.subscription, registered.handler
        try:
            return HandlerInvoker().claim(subscription, handler, delivery, claimed, generation=1)
        except SystemExit as error:
            return error

    def share(self, deliveries: Sequence[Delivery]) -> list[Any]:
        """Return a result for each delivery; a delivery that never joined runs alone."""
        assert self.registered is not None
        first, more = deliveries[0], Waiting(deliveries[1:])
        subscription, handler = self.registered.subscription, self.registered.handler
        with log_context.handling([first]):
            call = copy_context()
            results = call.run(self._invoker.share, subscription, handler, first, more, generation=1)
        return [*results, *[RunAlone.RUN_ALONE] * (len(deliveries) - len(results))]


@contextlib.contextmanager
def _handling(group: str, interpreter: _Interpreter) -> Iterator[_Deliver]:
    deliver = _Deliver(interpreter)

    batch, effects = 10 if group == "batch" else 1, Effects.OUTSIDE if group == "outside" else Effects.INSIDE

    @subscriber(HANDLED_TOPIC, group=group, using=interpreter.alias, batch=batch, effects=effects)
    def handler(given: Any) -> None:
        interpreter.given = given if isinstance(given, ClaimedDelivery) else None
        interpreter.look(given if isinstance(given, list) else [given])
        if isinstance(given, Delivery) and given.key in interpreter.trace.others:
            EffectRow.objects.using(interpreter.alias).create(number=given.key)
        else:
            if interpreter.attempt.has_conflicted:
                # The rows and messages of a repeated call have names of their own.
                interpreter.prefix = f"{interpreter.trace.name}.a{len(interpreter.trace.attempts)}.again"
            interpreter.body(deliver.steps)

    deliver.registered = next(item for item in subscribers() if item.subscription.group == group)
    yield deliver
