"""Sagas: several steps for one record, each in its own transaction.

If a step refuses, the saga undoes the earlier steps.

Sagas consist of subscribers and need no further process. The record is a row of the application. A row of the table
`outbox_saga`, in the same database, stores the progress of the record's saga. Each step is a subscriber. In its
handler's transaction, a step locks the record and the saga's row, does its work, and publishes the next message. So a
step takes effect once, even if a process is killed, and a late message has no effect. A step that must wait (for a
payment, for another service) returns WAIT. The wait ends when your code calls `proceed` or `refuse`, or at the step's
deadline. The deadline is a delayed message whose key contains the record and the step. After an answer to the step, the
saga recalls the delayed message.

    booking = Saga("booking", Booking, topic="bookings")

    @booking.step(undo=release_room)
    def reserve_room(record): ...

Import this module only after Django has loaded the apps, for example in a module `subscribers` of an app.

The state is a row of its own, not columns of the record: `save()` of a stale record would write an old state back. A
step locks the record first, then this row, so that code which has locked the record can answer the saga without a
deadlock.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from enum import Enum
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar

from django.core.exceptions import ObjectDoesNotExist
from django.db import connections, models, router, transaction
from django.db.models import Q, QuerySet
from django.db.models.signals import post_delete
from django.utils import timezone

from outbox import Delivery, names
from outbox.broker.database.executor import Executor
from outbox.broker.operations.conditions import BY_ERROR, Concern, Declarations, Judged, Severity, Shown, Symptom
from outbox.broker.operations.trace import Whereabouts, whereabouts
from outbox.contrib.django.database.aliases import broker_executor
from outbox.contrib.django.database.transactions import in_transaction
from outbox.contrib.django.operations.personal_data import Rows, Scope, saved
from outbox.contrib.django.publishing.publish import publish
from outbox.contrib.django.publishing.steering import recall_key
from outbox.contrib.django.settings.conf import get_settings
from outbox.contrib.django.subscribers.callables import is_asynchronous, is_generator
from outbox.contrib.django.subscribers.registry import Subscriber, autodiscover, register
from outbox.contrib.saga.models import SagaProgress, SagaState
from outbox.erased import ERASED_TEXT
from outbox.errors import ConfigurationError, InvalidSubscription, TransactionUsageError, UsageError
from outbox.retry import RetryPolicy
from outbox.subscription import Subscription
from outbox.utils.safe_text import shown_text

__all__ = ["WAIT", "Saga", "SagaProgress", "SagaState", "Step", "StepAnswer", "StepRefused"]

if TYPE_CHECKING:
    from outbox.broker.operations.state import BrokerState

logger = logging.getLogger(__name__)


class StepRefused(Exception):
    """A step raises this exception to refuse for a business reason.

    The effects of the step are rolled back, and earlier steps are undone.

    The text of the exception is stored as the saga's `reason`. Any other exception is a failure, and the step is tried
    again.
    """


class StepAnswer(Enum):
    """The values that a step may return if it is not done yet. A step that is done returns None."""

    WAIT = "wait"


WAIT: Final = StepAnswer.WAIT


Record = TypeVar("Record", bound=models.Model)
Work = TypeVar("Work", bound=Callable[..., Any])

_UNDO: Final = "undo."
_LATE: Final = "late."


@dataclass(frozen=True, kw_only=True)
class Step(Generic[Record]):
    """One step: its function `work`, its compensation `undo`, and the longest wait `within` for an answer."""

    name: str
    work: Callable[[Record], StepAnswer | None]
    undo: Callable[[Record], None] | None
    within: timedelta | None


class Saga(Generic[Record]):
    """The steps for the records of one model, in the order in which the steps are declared.

    The saga's messages are published to `topic`. If steps have deadlines, declare the topic with the types NORMAL,
    DELAY and TRANSACTION. Each step is a consumer group `NAME.STEP` of the topic. The saga finds a step by its name. So
    if you rename a step, the saga cannot continue for records that are at this step.
    """

    def __init__(self, name: str, record: type[Record], *, topic: str) -> None:
        names.check_group(name)
        names.check_topic(topic)
        self.name: Final = name
        self.topic: Final = topic
        self._record = record
        self._steps: list[Step[Record]] = []
        _sagas[name] = self
        post_delete.connect(self._forget, sender=record, weak=False, dispatch_uid=f"outbox.saga.{name}")

    def step(
        self,
        *,
        undo: Callable[[Record], None] | None = None,
        within: timedelta | None = None,
        retry: RetryPolicy | None = None,
    ) -> Callable[[Work], Work]:
        """Declare the next step.

        The step's function gets the locked record, and runs in the transaction that handles the step's message. The
        function returns None if the step is done, or WAIT if the step waits for an answer. If the earlier steps must be
        undone, the function raises StepRefused. `undo` reverses the effects of the step, and must not raise
        StepRefused. If a step waits for longer than `within`, the saga refuses the step. `retry` applies to failures of
        the function and of `undo`. After the last attempt, the message becomes a dead letter. If an operator replays
        the dead letter, the saga continues.
        """

        def declare(work: Work) -> Work:
            self._add(Step(name=work.__name__, work=work, undo=undo, within=within), retry)
            return work

        return declare

    def start(self, record: Record) -> None:
        """Start the saga when the open transaction commits.

        Call this method in the transaction that creates the record. Raises UsageError if no transaction is open, or if
        the record's saga was started before.
        """
        if not self._steps:
            raise ConfigurationError(f"saga {self.name!r} has no steps: import the module that declares them.")
        if not in_transaction(transaction.get_connection(self._alias)):
            raise TransactionUsageError(
                f"saga {self.name!r} of record {record.pk}: no transaction is open. Start the saga inside the "
                f"atomic() that stores the record; otherwise a crash can leave a record without a saga."
            )
        self._locked(record.pk)
        progress, is_new = SagaProgress.objects.using(self._alias).get_or_create(
            saga=self.name,
            record=self._stored_pk(record.pk),
            defaults={"state": SagaState.RUNNING, "step": self._steps[0].name, "changed_at": timezone.now()},
        )
        if not is_new:
            raise UsageError(f"saga {self.name!r} of record {record.pk} was started before.")
        self._save(progress, SagaState.RUNNING, self._steps[0])

    def progress(self, pk: object) -> SagaProgress | None:
        """Return the `state`, `step` and `reason` of a record's saga, or None if the saga was not started."""
        return self._progress(pk).first()

    def proceed(self, pk: object, *, at: str) -> bool:
        """Give a positive answer to the waiting step `at`: the saga continues with the next step.

        The method uses the open transaction, or begins a transaction if none is open. If the deadline has passed, or
        the step was answered before, the method does nothing and returns False.
        """
        return self._answer(pk, at, self._go_on)

    def refuse(self, pk: object, reason: str, *, at: str) -> bool:
        """Give a negative answer to the waiting step `at`: undo this step and all earlier steps.

        Otherwise like `proceed`.
        """
        return self._answer(pk, at, lambda progress, step: self._turn_back(progress, step, reason))

    def deadline_key(self, pk: object, step: str) -> str:
        """Return the key of the deadline message of a record and a step. No other message has this key."""
        return f"{self.name}/{self._stored_pk(pk)}/{step}"

    # -- declaration ------------------------------------------------------------------------------------

    def _add(self, step: Step[Record], retry: RetryPolicy | None) -> None:
        where = f"step {step.name!r} of saga {self.name!r}"
        if any(known.name == step.name for known in self._steps):
            raise ConfigurationError(f"{where} is declared twice: give each function its own name.")
        for function in (step.work, step.undo):
            if function is not None and (is_asynchronous(function) or is_generator(function)):
                raise ConfigurationError(f"{where}: a step and its undo must be plain functions, not {function!r}.")
        names.check_tag(step.name)
        tags = " || ".join((step.name, _UNDO + step.name, _LATE + step.name))
        subscription = Subscription(group=f"{self.name}.{step.name}", topic=self.topic, filter=tags)
        if retry is not None:
            subscription = replace(subscription, retry=retry)
        handler = partial(self._handle, step)
        # The record and the inbox row of the message must be in one database.
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
            f"saga {self.name!r} has no step {name!r}; use one of: {', '.join(step.name for step in self._steps)}."
        )

    # -- messages ---------------------------------------------------------------------------------------

    def _handle(self, step: Step[Record], delivery: Delivery) -> None:
        """Handle a message of `step`: run the step, undo the step, or refuse the step after its deadline."""
        pk = delivery.body["pk"]
        try:
            record = self._locked(pk)
        except ObjectDoesNotExist:
            logger.warning("saga %s: its record %s was deleted, so %s ends", self.name, pk, delivery.tag)
            self._progress(pk).delete()
            return
        progress = self._progress(pk).select_for_update().first()
        if progress is None:
            logger.warning("saga %s: the progress of record %s was deleted, so %s ends", self.name, pk, delivery.tag)
            return
        stands_at = SagaState(progress.state), progress.step
        if delivery.tag == step.name and stands_at == (SagaState.RUNNING, step.name):
            self._run(record, progress, step)
        elif delivery.tag == _UNDO + step.name and stands_at == (SagaState.UNDOING, step.name):
            self._undo(record, progress, step)
        elif (
            delivery.tag == _LATE + step.name
            and stands_at == (SagaState.WAITING, step.name)
            # A deleted record may have had the same primary key, and its deadline is another one.
            and delivery.message_id == progress.message_id
        ):
            self._turn_back(progress, step, f"{step.name} was not answered within {step.within}")
        else:
            logger.info(
                "saga %s of record %s has continued, so the message %s comes too late", self.name, pk, delivery.tag
            )

    def _run(self, record: Record, progress: SagaProgress, step: Step[Record]) -> None:
        try:
            # The savepoint is needed to roll back the effects and messages of a refused step.
            with transaction.atomic(using=self._alias):
                answer = step.work(record)
        except StepRefused as refusal:
            self._turn_back(progress, self._before(step), shown_text(refusal))
            return
        if answer is None:
            self._go_on(progress, step)
        elif answer is WAIT:
            self._wait(progress, step)
        else:
            raise UsageError(f"step {step.name!r} of saga {self.name!r} returned {answer!r:.80}: return None or WAIT.")

    def _wait(self, progress: SagaProgress, step: Step[Record]) -> None:
        progress.late_at = None if step.within is None else timezone.now() + step.within
        self._save(progress, SagaState.WAITING, step)

    def _answer(self, pk: object, at: str, act: Callable[[SagaProgress, Step[Record]], None]) -> bool:
        step = self._find(at)
        with transaction.atomic(using=self._alias):
            record = self._locked(pk)
            progress = self._progress(record.pk).select_for_update().first()
            if progress is None or (progress.state, progress.step) != (SagaState.WAITING, step.name):
                return False
            act(progress, step)
            if step.within is not None:
                # The step has its answer, so its deadline message would have no effect. The saga recalls the deadline
                # message, so that the broker does not deliver it.
                recalled = partial(recall_key, self.topic, self.deadline_key(record.pk, step.name))
                transaction.on_commit(recalled, using=self._alias, robust=True)
        return True

    def _undo(self, record: Record, progress: SagaProgress, step: Step[Record]) -> None:
        assert step.undo is not None
        step.undo(record)
        self._turn_back(progress, self._before(step), progress.reason)

    # -- moves ------------------------------------------------------------------------------------------

    def _go_on(self, progress: SagaProgress, done: Step[Record]) -> None:
        following = self._steps[self._steps.index(done) + 1 :]
        if following:
            self._save(progress, SagaState.RUNNING, following[0])
        else:
            self._save(progress, SagaState.DONE, done)

    def _turn_back(self, progress: SagaProgress, last_done: Step[Record] | None, reason: str) -> None:
        """Begin to undo `last_done` and then all earlier steps. `last_done` is None if no step was done."""
        progress.reason = reason
        step = last_done
        while step is not None and step.undo is None:
            step = self._before(step)
        if step is None:
            self._save(progress, SagaState.UNDONE, self._find(progress.step))
        else:
            self._save(progress, SagaState.UNDOING, step)

    def _before(self, step: Step[Record]) -> Step[Record] | None:
        place = self._steps.index(step)
        return self._steps[place - 1] if place else None

    def _progress(self, pk: object) -> QuerySet[SagaProgress]:
        """Return a query for the row of the saga's progress.

        Lock the record before you lock this row. Application code uses the same order if it locks the record and then
        calls `proceed` or `refuse`, so no deadlock is possible.
        """
        return SagaProgress.objects.using(self._alias).filter(saga=self.name, record=self._stored_pk(pk))

    def _stored_pk(self, pk: object) -> str:
        """Return a primary key as the saga stores it. A new record may have its key in another form than a read one."""
        return str(self._record._meta.pk.to_python(pk))

    def _locked(self, pk: object) -> Record:
        return self._record._base_manager.using(self._alias).select_for_update().get(pk=pk)

    def _save(self, progress: SagaProgress, state: SagaState, step: Step[Record]) -> None:
        progress.state, progress.step, progress.changed_at = state, step.name, timezone.now()
        if state is not SagaState.WAITING:
            progress.late_at = None
        self._announce(progress, step)
        progress.save(using=self._alias)

    def _announce(self, progress: SagaProgress, step: Step[Record]) -> None:
        """Publish the message that continues the saga. A step that waits without a deadline needs no message."""
        state, pk, delay = progress.state, progress.record, None
        key = f"{self.name}/{pk}"
        if state == SagaState.RUNNING:
            tag = step.name
        elif state == SagaState.UNDOING:
            tag = _UNDO + step.name
        elif state == SagaState.WAITING and step.within is not None:
            tag, key, delay = _LATE + step.name, self.deadline_key(pk, step.name), step.within
        else:
            # A saga that has ended keeps its last message, by which an erasure finds its reason.
            if state == SagaState.WAITING:
                progress.message_id = None
            return
        receipt = publish(self.topic, {"pk": pk}, key=key, tag=tag, delay=delay, using=self._alias)
        progress.message_id = receipt.message_id

    # -- stranded sagas -------------------------------------------------------------------------------------

    def publish_again(self, progress: SagaProgress) -> bool:
        """Publish a new message for a saga whose message is lost. Return whether a message was published.

        The result is False if the saga has continued meanwhile, or if a handler has locked the saga's row.
        """
        with transaction.atomic(using=self._alias):
            same = self._progress(progress.record).filter(
                state=progress.state, step=progress.step, message_id=progress.message_id
            )
            if connections[self._alias].features.has_select_for_update_skip_locked:
                same = same.select_for_update(skip_locked=True)
            found = same.first()
            step = next((step for step in self._steps if step.name == progress.step), None)
            if found is None or step is None:
                return False
            if found.state == SagaState.WAITING:
                # The deadline of the step has passed, so the new message has no delay.
                step = replace(step, within=timedelta(0))
            self._announce(found, step)
            found.save(using=self._alias, update_fields=["message_id"])
        return True

    def _forget(self, instance: models.Model, using: str, **_: Any) -> None:
        """Delete the progress of a deleted record, because another record may get the same primary key."""
        stored_pk = self._stored_pk(instance.pk)
        SagaProgress.objects.using(using).filter(saga=self.name, record=stored_pk).delete()


# Examine a saga's message only after this time, because the message may still wait for its handler.
_GRACE: Final = timedelta(seconds=60)
# The condition examines at most this many sagas, and begins with the saga that has been at its step for the longest
# time. The periodic pass examines more sagas.
_LOOKED_AT: Final = 200
_MENDED: Final = 10_000

_WHY: Final = {
    Whereabouts.PASSED: "the message of the saga was consumed, but the saga did not continue",
    Whereabouts.GONE: "the broker does not have the message of the saga",
    Whereabouts.DEAD: "the message of the saga is a dead letter",
    Whereabouts.DISCARDED: "the dead letter of the saga was discarded",
}
_sagas: Final[dict[str, Saga[Any]]] = {}


CONDITIONS: Final[Declarations[BrokerState]] = Declarations()


@CONDITIONS.declare(
    meaning="A saga waits, because the message of its next step, or of its deadline, is lost or a dead letter.",
    next_step="`outbox_dead_letter list GROUP` shows the dead letters of these sagas: replay them. A worker with the "
    "role `check` publishes lost messages again within a minute.",
    concern=Concern.WITHIN_DAYS,
    symptom=Symptom.HANDLERS,
    subject=("saga",),
    shown=Shown(listed=BY_ERROR, figure="Dead letters"),
)
def saga_stalled(state: BrokerState) -> Iterator[Judged]:
    """The query reads a limited number of rows by an index."""
    for one, where in _stalled(state.run, limit=_LOOKED_AT):
        yield (
            Severity.WARNING,
            {
                "saga": one.saga,
                "record": one.record,
                "step": one.step,
                "state": one.state,
                "since_seconds": round((timezone.now() - (one.late_at or one.changed_at)).total_seconds()),
                "message": str(one.message_id or ""),
                "why": _WHY[where],
            },
        )


def mend() -> Mapping[str, Any]:
    """Publish a new message for every saga whose message is lost.

    If the message is a dead letter, an operator must settle it.
    """
    if not get_settings().has_database:
        return {}
    published = 0
    with broker_executor() as run:
        for progress, where in _stalled(run, limit=_MENDED):
            saga = _sagas.get(progress.saga)
            if saga is not None and where in (Whereabouts.PASSED, Whereabouts.GONE) and saga.publish_again(progress):
                logger.warning("saga %s has a new message: %s", progress, _WHY[where])
                published += 1
    return {"published": published}


def _stalled(run: Executor, *, limit: int) -> Iterator[tuple[SagaProgress, Whereabouts]]:
    before = timezone.now() - _GRACE
    moves = Q(state__in=(SagaState.RUNNING, SagaState.UNDOING), changed_at__lt=before)
    late = Q(state=SagaState.WAITING, late_at__lt=before)
    # A process of the role check, or one that shows conditions, may not have imported the modules with the sagas.
    try:
        autodiscover()
    except (ConfigurationError, InvalidSubscription) as error:
        # The other conditions must be shown all the same.
        logger.warning("sagas may be missing: %s", shown_text(error))
    # Read only databases with records of declared sagas. The database of a former broker has no table for sagas.
    for alias in sorted({saga._alias for saga in _sagas.values()}):
        by_group: dict[str, list[SagaProgress]] = defaultdict(list)
        for one in SagaProgress.objects.using(alias).filter(moves | late).order_by("changed_at")[:limit]:
            by_group[f"{one.saga}.{one.step}"].append(one)
        for group, mine in by_group.items():
            places = whereabouts(run, group, [one.message_id for one in mine if one.message_id is not None])
            for one in mine:
                where = places[one.message_id] if one.message_id is not None else Whereabouts.GONE
                same = {"pk": one.pk, "message_id": one.message_id, "state": one.state, "step": one.step}
                # Read the saga's row again, because the saga may have continued after the first query.
                if where in _WHY and SagaProgress.objects.using(alias).filter(**same).exists():
                    yield one, where


def _topic_of(saga: str) -> str | None:
    declared = _sagas.get(saga)
    return None if declared is None else declared.topic


def erase_reasons(rows: Rows, scope: Scope) -> int:
    """Replace the reasons of sagas that belong to an erased message or key, or mention an erased text."""
    return saved(
        rows.exclude(reason="").exclude(reason=ERASED_TEXT),
        lambda row: (
            row.message_id in scope.message_ids
            # Retention removes the messages of a saga before its row.
            or (scope.is_key(f"{row.saga}/{row.record}") and _topic_of(row.saga) in (scope.topic, None))
            or scope.mentions(row.reason)
        ),
        lambda row: {"reason": ERASED_TEXT},
    )
