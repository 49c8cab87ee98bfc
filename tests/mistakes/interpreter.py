"""Runs programs against real databases, and notes what they saw."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

from django.db import connections, transaction
from django.db.backends.base.base import BaseDatabaseWrapper

from outbox import Delivery, Message
from outbox.contrib.django import publish, subscriber, transactional_message
from outbox.contrib.django.subscribers.inbox import InboxInvoker
from outbox.contrib.django.subscribers.registry import Subscriber, subscribers
from outbox.errors import PermanentError
from outbox.ports import Disposition, RunAlone
from outbox.utils.ids import uuid7
from tests.django.sharing import Waiting
from tests.django.shop.models import Effect as EffectRow
from tests.django.shop.models import Order, Payment
from tests.django.state import savepoint
from tests.mistakes import grammar
from tests.mistakes.grammar import Block, Consumer, Producer, Program, Step
from tests.mistakes.others import DUPLICATE, LOCKED, Others, is_alive, tidy
from tests.mistakes.traces import AttemptSeen, PairSeen, Trace

# Nobody publishes to it: handlers are called with deliveries that are made here.
HANDLED_TOPIC: Final = "payments"


class Mistake(Exception):
    """What an application raises."""


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
        trace.ended_with = f"{type(error).__name__}: {error}"
    tidy(connections[others.alias])
    return trace


class _Interpreter:
    def __init__(self, others: Others, trace: Trace) -> None:
        self.others = others
        self.alias = others.alias
        self.trace = trace
        self.prefix = trace.name
        self.attempt = AttemptSeen()
        self._rows = 0

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
            case grammar.Write():
                self._rows += 1
                self._row(f"{self.prefix}.w{self._rows}", step.raw)
            case grammar.Effect():
                self._effect(step.part)
            case grammar.Fail():
                self._fail(step.how)
            case grammar.Sql():
                self._by_hand(step)
            case grammar.SetRollback():
                transaction.set_rollback(True, using=self.alias)
            case grammar.Close():
                self._close()
            case grammar.Kill():
                self.others.kill(self.connection)
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
        if raw:
            self._execute("INSERT INTO shop_order (number, status) VALUES (%s, 'new')", [number])
        else:
            Order.objects.using(self.alias).create(number=number)

    def _pair(self, step: grammar.Pair) -> None:
        seen = PairSeen(key=f"{self.prefix}.{step.number}", row_first=step.row_first)
        self.trace.pairs.append(seen)
        seen.in_block = self.connection.in_atomic_block
        # SQLite has one writer, and that may be the thread that waits for this one.
        lone_thread = self.connection.vendor == "sqlite" and threading.current_thread() is not threading.main_thread()
        if step.row_first and not lone_thread:
            self._row(seen.key, step.raw)
        seen.alive = is_alive(self.connection)
        # Without `using` outside of a block, like an application that has only one database to think of.
        publish("orders", {}, key=seen.key, using=self.alias if seen.in_block else None)
        seen.returned = True
        if not step.row_first and not lone_thread:
            self._row(seen.key, step.raw)

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
            case "constraint at commit":
                Payment.objects.using(self.alias).create(reference=DUPLICATE)

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
                with contextlib.suppress(Exception):
                    self.body(step.body)
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

    def _decorated(self, step: grammar.Decorated) -> None:
        seen = PairSeen(f"{self.prefix}.{step.number}", decorated=True, in_block=True, row_first=step.last)
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
        transactional_message("orders", key=seen.key, body=body, using=self.alias)(work)()
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
                    self.body(step.body)
            finally:
                connections.close_all()

        thread = threading.Thread(target=work)
        thread.start()
        thread.join()


# -- the consumer's side ----------------------------------------------------------------------------


def _consume(program: Consumer, interpreter: _Interpreter) -> None:
    """Deliver until it counts as handled, then once more, as a lost offset would."""
    trace = interpreter.trace
    trace.keys = [f"{trace.name}.d{index}" for index in range(program.batch)]
    group = "single" if program.batch == 1 else "batch"
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
    message = Message(topic=HANDLED_TOPIC, body=b"{}", key=key, message_id=uuid7())
    return Delivery(message=message, body={}, group=group, queue=f"{HANDLED_TOPIC}/0", offset=offset)


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
        interpreter.attempt = AttemptSeen()
        trace.attempts.append(interpreter.attempt)
        interpreter.prefix = f"{trace.name}.a{len(trace.attempts)}"
        clean = (grammar.Effect(1), grammar.Effect(2))
        self.steps = program.attempts[self._begun] if self._begun < len(program.attempts) else clean
        self._begun += 1

    def end(self, results: Sequence[Any]) -> bool:
        seen = self.interpreter.attempt
        seen.error = next((f"{type(item).__name__}: {item}" for item in results if isinstance(item, Exception)), "")
        seen.counts_as_handled = all(isinstance(item, Disposition) for item in results)
        seen.given_up = any(isinstance(item, PermanentError) for item in results)
        seen.skipped = all(item is Disposition.SKIPPED for item in results)
        if RunAlone.RUN_ALONE in results:
            # The next attempt is this one once more.
            self._begun -= 1
        return seen.counts_as_handled

    def alone(self, deliveries: Sequence[Delivery]) -> list[Any]:
        assert self.registered is not None
        return list(self._invoker(self.registered.subscription, self.registered.handler, deliveries, generation=1))

    def share(self, deliveries: Sequence[Delivery]) -> list[Any]:
        """Return a result for each delivery; a delivery that never joined runs alone."""
        assert self.registered is not None
        first, more = deliveries[0], Waiting(deliveries[1:])
        results = self._invoker.share(self.registered.subscription, self.registered.handler, first, more, generation=1)
        return [*results, *[RunAlone.RUN_ALONE] * (len(deliveries) - len(results))]


@contextlib.contextmanager
def _handling(group: str, interpreter: _Interpreter) -> Iterator[_Deliver]:
    deliver = _Deliver(interpreter)

    @subscriber(HANDLED_TOPIC, group=group, using=interpreter.alias, batch=10 if group == "batch" else 1)
    def handler(given: Any) -> None:
        if isinstance(given, Delivery) and given.key in interpreter.trace.others:
            EffectRow.objects.using(interpreter.alias).create(number=given.key)
        else:
            interpreter.body(deliver.steps)

    deliver.registered = next(item for item in subscribers() if item.subscription.group == group)
    yield deliver
