"""Call a handler in a thread of the pool, with decoded bodies and fenced; errors become results."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence

from outbox import tracing
from outbox.broker.dispatch.fetch import LOG_ID, deliver, restore
from outbox.broker.dispatch.running_calls import RunningCalls
from outbox.broker.dispatch.subscriptions import Subscribed
from outbox.broker.dispatch.work import NOT_STARTED, HandlerCall, Result
from outbox.codec import Codecs
from outbox.errors import OutboxError, UndecodableBody
from outbox.message import Delivery
from outbox.ports import Invoker
from outbox.utils import faults, fence, log_context, measures

logger = logging.getLogger(__name__)


class Caller:
    """Runs calls: fills in their results and hands them to `finished`."""

    def __init__(
        self,
        invoker: Invoker,
        codecs: Codecs,
        finished: Callable[[HandlerCall], None],
        running: RunningCalls | None = None,
    ) -> None:
        self._invoker = invoker
        self._codecs = codecs
        self._finished = finished
        self._running = running
        # Decoding holds the interpreter lock all the time. With this lock, only one thread decodes; otherwise the
        # dispatching thread would wait one switch interval for each decoding thread.
        self._decoding = threading.Lock()

    def run(self, work: HandlerCall) -> None:
        """Call the handler for those messages that may be started now."""
        try:
            work.results = self._call(work)
        except BaseException as error:
            # An error of this code or of the invoker must not end the thread: the attempt failed.
            logger.exception("calling the handler of group %r failed", work.subscribed.subscription.group)
            work.results = [error] * len(work.items)
        self._finished(work)

    def _call(self, work: HandlerCall) -> list[Result]:
        work.start()
        faults.point("consumer.before_handler")
        results: list[Result] = [NOT_STARTED] * len(work.items)
        with self._decoding:
            deliveries, places = self._deliveries(work, results)
        if not deliveries:
            return results
        subscribed = work.subscribed
        recorder = measures.recorder
        started = time.time() if recorder is not None else 0.0
        with fence.attempt(work.fence_reason), log_context.handling(deliveries), self._noted(work, places):
            outcomes = self._invoke(subscribed, deliveries)
        if len(outcomes) != len(places):
            raise OutboxError(
                f"the invoker returned {len(outcomes)} results for {len(places)} deliveries of group "
                f"{subscribed.group.name!r}: it must return one per delivery."
            )
        for place, outcome in zip(places, outcomes, strict=True):
            results[place] = outcome
        if recorder is not None:
            subscription = subscribed.subscription
            failed = sum(isinstance(outcome, BaseException) for outcome in outcomes)
            took = time.time() - started
            recorder.handled(subscription.group, subscription.topic, _waits(deliveries, started), took, failed=failed)
        return results

    def _invoke(self, subscribed: Subscribed, deliveries: Sequence[Delivery]) -> Sequence[Result]:
        generation = subscribed.group.generation
        if tracing.tracer is None:
            return self._invoker(subscribed.subscription, subscribed.handler, deliveries, generation=generation)
        with tracing.tracer.handling(deliveries) as conclude:
            outcomes = self._invoker(subscribed.subscription, subscribed.handler, deliveries, generation=generation)
            conclude(outcomes)
        return outcomes

    @contextlib.contextmanager
    def _noted(self, work: HandlerCall, places: Sequence[int]) -> Iterator[None]:
        """Note the call while the handler runs, for this process's parent."""
        if self._running is None:
            yield
            return
        log_ids = [row[LOG_ID] for place in places if (row := work.items[place].row) is not None]
        slot = self._running.note(work.subscribed.group.group_id, log_ids, alone=work.alone)
        try:
            yield
        finally:
            if slot is not None:
                self._running.forget(slot)

    def _deliveries(self, work: HandlerCall, results: list[Result]) -> tuple[list[Delivery], list[int]]:
        """Return the deliveries and their places in the call; fill in the results of those that are not called."""
        group, topic = work.subscribed.group.name, work.subscribed.subscription.topic
        decode = self._codecs.decode
        # Check after the fault point: a process frozen there finds its lease over before any handler starts.
        startable = {queue: queue.may_start() for queue in {item.queue for item in work.items}}
        deliveries: list[Delivery] = []
        places: list[int] = []
        for place, item in enumerate(work.items):
            if not startable[item.queue]:
                continue
            assert item.row is not None
            message = restore(item.row, topic)
            try:
                body = decode(message.content_type, message.body)
            except UndecodableBody as error:
                results[place] = error
                continue
            except Exception as error:
                results[place] = UndecodableBody(
                    f"the codec for {message.content_type!r} failed on message {message.message_id} with "
                    f"{type(error).__name__}: {error}"
                )
                continue
            deliveries.append(deliver(item.row, message, body, group, item.queue.name, item.offset, item.attempt))
            places.append(place)
        return deliveries, places


def _waits(deliveries: Sequence[Delivery], now: float) -> list[float]:
    """Return how long messages have waited for their first call.

    The time counts from publishing or from the due time, by this machine's clock.
    """
    since = [
        max(filter(None, (delivery.message.born_at, delivery.message.deliver_at)))
        for delivery in deliveries
        if delivery.attempt == 1
    ]
    return [max(0.0, now - moment.timestamp()) for moment in since]
