"""Sagas: several steps about one record, each in a transaction of its own; what was done is undone when one is refused.

A helper over subscribers, not an engine: the record is a row of the application (`SagaRecord`), each step a subscriber
that locks it, does its work, and publishes what comes next, all in the handler's transaction. So a step takes effect
once, whatever is killed, and a message that comes too late finds that the record has moved on. A step that has to wait
(for a payment, for another service) returns WAIT; `proceed`, `refuse` or its deadline goes on. The deadline is a
delayed message with a key of its own record and step, and is recalled when it is not needed any more.

    booking = Saga("booking", Booking, topic="bookings")

    @booking.step(undo=release_room)
    def reserve_room(record): ...

Import this from modules of installed apps; it needs loaded apps.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from enum import Enum
from functools import partial
from typing import Any, Final, Generic, TypeVar

from django.db import models, router, transaction

from outbox import Delivery, names
from outbox.contrib.django.publishing.publish import publish
from outbox.contrib.django.publishing.steering import recall_key
from outbox.contrib.django.subscribers.callables import is_asynchronous, is_generator
from outbox.contrib.django.subscribers.registry import Subscriber, register
from outbox.errors import ConfigurationError, TransactionUsageError, UsageError
from outbox.retry import RetryPolicy
from outbox.subscription import Subscription

logger = logging.getLogger(__name__)


class StepRefused(Exception):
    """Raised by a step: the business says no. Its effects are rolled back, and earlier steps are undone.

    Its text is kept as the record's `saga_reason`. Any other exception is a failure, and the step is tried again.
    """


class Answer(Enum):
    """What a step may return beside None (done)."""

    WAIT = "wait"


WAIT: Final = Answer.WAIT


class SagaState(models.TextChoices):
    """How far a saga is. RUNNING and UNDOING: a message for `saga_step` is on its way."""

    RUNNING = "running", "Running"
    WAITING = "waiting", "Waiting for an answer"
    UNDOING = "undoing", "Being undone"
    DONE = "done", "Done"
    UNDONE = "undone", "Undone"


class SagaRecord(models.Model):
    """What a saga is about, and how far it is: a row of the application. `saga_step` is empty before the start."""

    saga_state = models.CharField(max_length=16, choices=SagaState, default=SagaState.RUNNING, editable=False)
    saga_step = models.CharField(max_length=100, default="", editable=False)
    saga_reason = models.TextField(default="", editable=False)

    class Meta:
        abstract = True


Record = TypeVar("Record", bound=SagaRecord)
Work = TypeVar("Work", bound=Callable[..., Any])

_UNDO: Final = "undo."
_LATE: Final = "late."


@dataclass(frozen=True, kw_only=True)
class Step(Generic[Record]):
    """One step: what it does, what takes that back, and how long it waits at most after returning WAIT."""

    name: str
    work: Callable[[Record], Answer | None]
    undo: Callable[[Record], None] | None
    within: timedelta | None


class Saga(Generic[Record]):
    """The steps of a kind of record, in the order of their declaration.

    `topic` carries what comes next; where steps have deadlines it is declared with the types NORMAL, DELAY and
    TRANSACTION. Each step is a consumer group `NAME.STEP` of it. Steps are found by their names: one that is renamed
    strands the records that stand at it.
    """

    def __init__(self, name: str, record: type[Record], *, topic: str) -> None:
        names.check_group(name)
        names.check_topic(topic)
        self.name: Final = name
        self.topic: Final = topic
        self._record = record
        self._steps: list[Step[Record]] = []

    def step(
        self,
        *,
        undo: Callable[[Record], None] | None = None,
        within: timedelta | None = None,
        retry: RetryPolicy | None = None,
    ) -> Callable[[Work], Work]:
        """Declare the next step: a function of the locked record, run in the transaction of its message.

        It returns None when it is done, or WAIT; it raises StepRefused to have the earlier steps undone. `undo` takes
        back what it did, and may not refuse. `within`: a step that waits is refused after so long. `retry` is for
        failures of both; after the last attempt the message is a dead letter, and replaying it goes on.
        """

        def declare(work: Work) -> Work:
            self._add(Step(name=work.__name__, work=work, undo=undo, within=within), retry)
            return work

        return declare

    def start(self, record: Record) -> None:
        """Begin with the first step once the transaction that is open has committed; call it where the row is made.

        Raises UsageError without a transaction, and for a record whose saga has begun.
        """
        if not self._steps:
            raise ConfigurationError(f"saga {self.name!r} has no steps: import the module that declares them.")
        if not transaction.get_connection(self._alias).in_atomic_block:
            raise TransactionUsageError(
                f"saga {self.name!r} of record {record.pk}: start it inside the atomic() that stores the record, or a "
                f"crash between the two leaves a record without a saga."
            )
        if self._locked(record.pk).saga_step:
            raise UsageError(f"saga {self.name!r} of record {record.pk} was started before.")
        self._run_next(record, self._steps[0])

    def proceed(self, pk: object, *, at: str) -> bool:
        """The answer that step `at` waits for is there: go on with the next one.

        In the transaction that is open, else in one of its own. False, and nothing is done, when the record does not
        wait there (any more): its deadline was earlier, or it was answered before.
        """
        return self._answer(pk, at, self._go_on)

    def refuse(self, pk: object, reason: str, *, at: str) -> bool:
        """The answer that step `at` waits for is no: undo it and what was done before. Otherwise like `proceed`."""
        return self._answer(pk, at, lambda record, step: self._turn_back(record, step, reason))

    def deadline_key(self, pk: object, step: str) -> str:
        """The key of the deadline of a record at a step: of no other message."""
        return f"{self.name}/{pk}/{step}"

    # -- declaration ------------------------------------------------------------------------------------

    def _add(self, step: Step[Record], retry: RetryPolicy | None) -> None:
        where = f"step {step.name!r} of saga {self.name!r}"
        if any(known.name == step.name for known in self._steps):
            raise ConfigurationError(f"{where} is declared twice: give each function a name of its own.")
        for function in (step.work, step.undo):
            if function is not None and (is_asynchronous(function) or is_generator(function)):
                raise ConfigurationError(f"{where}: a step and its undo are plain functions, not {function!r}.")
        names.check_tag(step.name)
        tags = " || ".join((step.name, _UNDO + step.name, _LATE + step.name))
        subscription = Subscription(group=f"{self.name}.{step.name}", topic=self.topic, filter=tags)
        if retry is not None:
            subscription = replace(subscription, retry=retry)
        handler = partial(self._handle, step)
        # The record and the note that the message was handled are in one database.
        register(
            Subscriber(subscription=subscription, handler=handler, name=f"{self.name}.{step.name}", using=self._alias)
        )
        self._steps.append(step)

    @property
    def _alias(self) -> str:
        return router.db_for_write(self._record)

    def _find(self, name: str) -> Step[Record]:
        for step in self._steps:
            if step.name == name:
                return step
        raise UsageError(
            f"saga {self.name!r} has no step {name!r}; there are: {', '.join(step.name for step in self._steps)}."
        )

    # -- messages ---------------------------------------------------------------------------------------

    def _handle(self, step: Step[Record], delivery: Delivery) -> None:
        """A message of `step`: to run it, to undo it, or that it has waited for too long."""
        try:
            record = self._locked(delivery.body["pk"])
        except self._record.DoesNotExist:
            logger.warning("saga %s: its record %s was deleted, %s ends", self.name, delivery.body["pk"], delivery.tag)
            return
        stands_at = SagaState(record.saga_state), record.saga_step
        if delivery.tag == step.name and stands_at == (SagaState.RUNNING, step.name):
            self._run(record, step)
        elif delivery.tag == _UNDO + step.name and stands_at == (SagaState.UNDOING, step.name):
            self._undo(record, step)
        elif delivery.tag == _LATE + step.name and stands_at == (SagaState.WAITING, step.name):
            self._turn_back(record, step, f"{step.name} was not answered within {step.within}")
        else:
            logger.info("saga %s of record %s has moved on: %s comes too late", self.name, record.pk, delivery.tag)

    def _run(self, record: Record, step: Step[Record]) -> None:
        try:
            # A savepoint: what a refused step did is rolled back, its messages too.
            with transaction.atomic(using=self._alias):
                answer = step.work(record)
        except StepRefused as refusal:
            self._turn_back(record, self._before(step), str(refusal))
            return
        if answer is None:
            self._go_on(record, step)
        elif answer is WAIT:
            self._wait(record, step)
        else:
            raise UsageError(f"step {step.name!r} of saga {self.name!r} returned {answer!r:.80}: return None or WAIT.")

    def _wait(self, record: Record, step: Step[Record]) -> None:
        self._save(record, SagaState.WAITING, step.name)
        if step.within is not None:
            self._tell(record, _LATE + step.name, key=self.deadline_key(record.pk, step.name), delay=step.within)

    def _answer(self, pk: object, at: str, act: Callable[[Record, Step[Record]], None]) -> bool:
        step = self._find(at)
        with transaction.atomic(using=self._alias):
            record = self._locked(pk)
            if (record.saga_state, record.saga_step) != (SagaState.WAITING, step.name):
                return False
            act(record, step)
            if step.within is not None:
                # Saves the delivery of a deadline that would find that the record has moved on.
                recalled = partial(recall_key, self.topic, self.deadline_key(record.pk, step.name))
                transaction.on_commit(recalled, using=self._alias, robust=True)
        return True

    def _undo(self, record: Record, step: Step[Record]) -> None:
        assert step.undo is not None
        step.undo(record)
        self._turn_back(record, self._before(step), record.saga_reason)

    # -- moves ------------------------------------------------------------------------------------------

    def _go_on(self, record: Record, done: Step[Record]) -> None:
        following = self._steps[self._steps.index(done) + 1 :]
        if following:
            self._run_next(record, following[0])
        else:
            self._save(record, SagaState.DONE, done.name)

    def _run_next(self, record: Record, step: Step[Record]) -> None:
        self._save(record, SagaState.RUNNING, step.name)
        self._tell(record, step.name)

    def _turn_back(self, record: Record, last_done: Step[Record] | None, reason: str) -> None:
        """Undo `last_done`, and after it what was before; None when nothing was done."""
        record.saga_reason = reason
        step = last_done
        while step is not None and step.undo is None:
            step = self._before(step)
        if step is None:
            self._save(record, SagaState.UNDONE, record.saga_step)
            return
        self._save(record, SagaState.UNDOING, step.name)
        self._tell(record, _UNDO + step.name)

    def _before(self, step: Step[Record]) -> Step[Record] | None:
        place = self._steps.index(step)
        return self._steps[place - 1] if place else None

    def _locked(self, pk: object) -> Record:
        manager: models.Manager[Record] = self._record._base_manager
        return manager.using(self._alias).select_for_update().get(pk=pk)

    def _save(self, record: Record, state: SagaState, step: str) -> None:
        record.saga_state, record.saga_step = state, step
        record.save(using=self._alias, update_fields=["saga_state", "saga_step", "saga_reason"])

    def _tell(self, record: Record, tag: str, *, key: str = "", delay: timedelta | None = None) -> None:
        key = key or f"{self.name}/{record.pk}"
        publish(self.topic, {"pk": str(record.pk)}, key=key, tag=tag, delay=delay, using=self._alias)
