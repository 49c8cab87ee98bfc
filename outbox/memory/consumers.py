"""Consumers of the in-memory broker. Handlers run in the caller's thread, with retries and dead letters."""

from __future__ import annotations

import itertools
import logging
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Sequence
from contextvars import Context, copy_context
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Final
from uuid import UUID

from outbox import passing_over, tracing
from outbox.codec import Codecs
from outbox.errors import HandlerNotStarted, UndecodableBody
from outbox.filters.filter import Filter, parse_filter
from outbox.memory.log import Entry, Log
from outbox.message import Delivery, Message, afresh
from outbox.ports import AnyHandler, ConsumeCounts, Disposition, Invoker
from outbox.retry import code_wait_seconds
from outbox.subscription import OnError, Start, Subscription
from outbox.utils import given_up, log_context
from outbox.utils.safe_text import error_line, shown_text

logger = logging.getLogger(__name__)

_POLL_SECONDS: Final = 0.05


@dataclass(frozen=True)
class DeadLetter:
    """A dead letter of a group, with the error of every attempt."""

    group: str
    message: Message
    errors: tuple[str, ...]


@dataclass
class _Consumer:
    subscription: Subscription
    handler: AnyHandler
    filter: Filter
    offsets: Counter[int] = field(default_factory=Counter)

    @property
    def key(self) -> tuple[str, str]:
        return self.subscription.group, self.subscription.topic


@dataclass(frozen=True)
class _Retry:
    """A failed message and the time of its next attempt. `number`: among all retries of this broker."""

    due_at: datetime
    number: int
    consumer: _Consumer
    entry: Entry
    attempt: int


@dataclass(frozen=True)
class _Fetched:
    """A message that the next call of a handler gets."""

    entry: Entry
    attempt: int
    queue: str
    offset: int


class ConsumerGroups:
    """The subscriptions of all groups, their offsets, and their waiting retries."""

    def __init__(self, log: Log, *, codecs: Codecs, invoker: Invoker, now: Callable[[], datetime]) -> None:
        self.dead_letters: list[DeadLetter] = []
        # Counts the outcomes of deliveries. A key is the name of a field of ConsumeCounts.
        self.counts: Counter[str] = Counter()
        self._log = log
        self._codecs = codecs
        self._invoker = invoker
        self._now = now
        self._consumers: list[_Consumer] = []
        self._retries: list[_Retry] = []
        self._retry_numbers = itertools.count()
        self._errors: defaultdict[tuple[str, UUID], list[str]] = defaultdict(list)

    def immutable(self) -> list[object]:
        """Return what a copy of these groups shares with them."""
        consumers = [item for one in self._consumers for item in (one.subscription, one.handler, one.filter)]
        return [self._codecs, self._invoker, self._retry_numbers, *self.dead_letters, *consumers]

    def subscribe(self, subscription: Subscription, handler: AnyHandler) -> None:
        """Register a handler. If the group is new to the topic, it begins at the subscription's `start`."""
        with self._log.lock:
            self._log.topic(subscription.topic)
            consumer = self._find(subscription)
            if consumer is not None:
                consumer.subscription, consumer.handler = subscription, handler
                consumer.filter = parse_filter(subscription.filter)
                return
            consumer = _Consumer(subscription, handler, parse_filter(subscription.filter))
            if subscription.start is not Start.EARLIEST:
                self._log.sequence()
                for number, queue in self._log.queues_of(subscription.topic):
                    consumer.offsets[number] = _offset_of(subscription.start, queue)
            self._consumers.append(consumer)

    def recall(self, message_id: UUID) -> tuple[str, ...]:
        """Recall all retries of a message. Return the groups in which the message waited for a retry."""
        taken = [retry for retry in self._retries if retry.entry.message.message_id == message_id]
        for retry in taken:
            self._retries.remove(retry)
            retry.entry.recalled = True
        return tuple(sorted(retry.consumer.subscription.group for retry in taken))

    def retrying(self) -> list[Message]:
        return [retry.entry.message for retry in self._retries]

    def _find(self, subscription: Subscription) -> _Consumer | None:
        known = (one for one in self._consumers if one.key == (subscription.group, subscription.topic))
        return None if subscription.broadcast else next(known, None)

    def drain(self, only: Collection[tuple[str, str]] | None = None) -> int:
        """Run the handlers of all or of these pairs of group and topic, and return the number of handled deliveries."""
        handled = 0
        # A handler may subscribe another one.
        while drained := sum(self._drain_one(one) for one in list(self._consumers) if only is None or one.key in only):
            handled += drained
        return handled

    def _drain_one(self, consumer: _Consumer) -> int:
        count = 0
        while batch := self._fetch(consumer):
            # As in a consumer process, the handler meets no context variables of other code.
            Context().run(self._deliver, consumer, batch)
            count += len(batch)
        return count

    def _fetch(self, consumer: _Consumer) -> list[_Fetched]:
        """Return up to `batch` messages, due retries first, and move the consumer's offsets past them."""
        subscription = consumer.subscription
        with self._log.lock:
            self._log.sequence()
            due = [retry for retry in self._retries if retry.consumer is consumer and retry.due_at <= self._now()]
            due.sort(key=lambda retry: (retry.due_at, retry.number))
            batch: list[_Fetched] = []
            for retry in due[: subscription.batch]:
                self._retries.remove(retry)
                batch.append(_Fetched(retry.entry, retry.attempt, f"%RETRY%{subscription.group}", retry.number))
            for number, queue in self._log.queues_of(subscription.topic):
                name = f"{subscription.topic}/{number}"
                while len(batch) < subscription.batch and (offset := consumer.offsets[number]) < len(queue):
                    consumer.offsets[number] += 1
                    message = queue[offset].message
                    if not consumer.filter.evaluate(message.tag, message.headers):
                        self.counts["filtered"] += 1
                    else:
                        batch.append(_Fetched(queue[offset], 1, name, offset))
        return batch

    def _deliver(self, consumer: _Consumer, batch: list[_Fetched]) -> None:
        deliveries: list[Delivery] = []
        decode = consumer.subscription.decoder(self._codecs.decode)
        for fetched in batch:
            message = fetched.entry.message
            if fetched.entry.is_timed_out(self._now()):
                self.counts["timed_out"] += 1
                continue
            try:
                body = decode(message)
            except UndecodableBody as error:
                self._give_up(consumer, fetched.entry, shown_text(error))
                continue
            except HandlerNotStarted as error:
                self._wait(consumer, fetched.entry, fetched.attempt, error)
                continue
            deliveries.append(
                Delivery(
                    message=message,
                    body=body,
                    group=consumer.subscription.group,
                    queue=fetched.queue,
                    offset=fetched.offset,
                    attempt=fetched.attempt,
                    transaction_id=fetched.entry.transaction.transaction_id,
                    _decode=decode,
                )
            )
        if deliveries:
            self._call(consumer, deliveries)

    def _call(self, consumer: _Consumer, deliveries: list[Delivery]) -> None:
        with log_context.handling(deliveries):
            results = consumer.subscription.contained(self._invoke(consumer, deliveries))
        first = results[0]
        if (
            len(results) > 1
            and isinstance(first, Exception)
            and not isinstance(first, HandlerNotStarted)
            and all(result is first for result in results)
        ):
            # Halve the batch until the failing message is alone, like the real broker.
            middle = (len(deliveries) + 1) // 2
            again = afresh(deliveries)
            self._call(consumer, again[:middle])
            self._call(consumer, again[middle:])
            return
        for delivery, result in zip(deliveries, results, strict=True):
            if isinstance(result, Disposition):
                self.counts[str(result)] += 1
            else:
                self._failed(consumer, delivery, result)

    def _invoke(self, consumer: _Consumer, deliveries: list[Delivery]) -> Sequence[Disposition | Exception]:
        if tracing.tracer is None:
            return self._results(consumer, deliveries)
        with tracing.tracer.handling(deliveries) as conclude:
            results = self._results(consumer, deliveries)
            conclude(results)
        return results

    def _results(self, consumer: _Consumer, deliveries: list[Delivery]) -> Sequence[Disposition | Exception]:
        call = copy_context()
        results = call.run(self._invoker, consumer.subscription, consumer.handler, deliveries, generation=1)
        if not passing_over.is_to_pass(deliveries, results):
            return results
        passing_over.report(deliveries, results[0])
        return self._invoker(consumer.subscription, passing_over.do_nothing, deliveries, generation=1)

    def _failed(self, consumer: _Consumer, delivery: Delivery, error: Exception) -> None:
        subscription = consumer.subscription
        entry = self._log.entry(delivery.message_id)
        assert entry is not None
        if isinstance(error, HandlerNotStarted):
            self._wait(consumer, entry, delivery.attempt, error)
            return
        self.counts["failed"] += 1
        text = error_line(error)
        reaction = subscription.reaction(error)
        if reaction is OnError.DEAD_LETTER or subscription.retry.exhausted(delivery.attempt):
            self._give_up(consumer, entry, text)
            return
        self._errors[subscription.group, delivery.message_id].append(text)
        due_at = self._now() + timedelta(seconds=subscription.retry_delay_seconds(error, delivery.attempt))
        with self._log.lock:
            self._retries.append(_Retry(due_at, next(self._retry_numbers), consumer, entry, delivery.attempt + 1))

    def _wait(self, consumer: _Consumer, entry: Entry, attempt: int, error: HandlerNotStarted) -> None:
        """Let a message wait for newer code, or for what its handler needs, without an attempt."""
        group, message = consumer.subscription.group, entry.message
        logger.warning("group %s: message %s waits: %s", group, message.message_id, shown_text(error))
        due_at = self._now() + timedelta(seconds=code_wait_seconds(self._now(), message.born_at))
        with self._log.lock:
            self._retries.append(_Retry(due_at, next(self._retry_numbers), consumer, entry, attempt))

    def _give_up(self, consumer: _Consumer, entry: Entry, error: str) -> None:
        group = consumer.subscription.group
        errors = (*self._errors.pop((group, entry.message.message_id), []), error)
        self.dead_letters.append(DeadLetter(group, entry.message, errors))
        if given_up.listener is not None:
            message = entry.message
            about = {"group": group, "topic": message.topic, "key": message.key, "error": error}
            given_up.listener(given_up.GivenUp(**about, message_id=message.message_id, attempts=len(errors)))


class InMemoryConsumers:
    """Runs the given subscriptions in the calling thread (implements outbox.ports.Consumers)."""

    def __init__(self, groups: ConsumerGroups, subscriptions: Sequence[tuple[Subscription, AnyHandler]]) -> None:
        self._groups = groups
        self._only = {(subscription.group, subscription.topic) for subscription, _ in subscriptions}
        for subscription, handler in subscriptions:
            groups.subscribe(subscription, handler)

    def run(self, stop: threading.Event) -> None:
        while not stop.is_set():
            self._groups.drain(self._only)
            stop.wait(_POLL_SECONDS)

    def run_once(self) -> ConsumeCounts:
        before = self._groups.counts.copy()
        self._groups.drain(self._only)
        counts = self._groups.counts - before
        return ConsumeCounts(**{name: counts[name] for name in ConsumeCounts.__dataclass_fields__})


def _offset_of(start: Start | datetime, queue: list[Entry]) -> int:
    """Return the offset at which a group with this `start` begins."""
    if not isinstance(start, datetime):
        return len(queue)
    return sum(entry.queued_at is not None and entry.queued_at < start for entry in queue)
