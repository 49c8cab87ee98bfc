"""Consumers of RocketMQ.

A consumer receives messages, calls handlers through the invoker, and acknowledges each message.

A received message is invisible to other consumers for a time. The consumer extends this time while the handler runs. If
the consumer dies, the message becomes visible again. The server counts the attempts. To delay the next attempt of a
failed message, the consumer sets a longer invisible time. After the last failure the message goes to the group's dead
letters (%DLQ%GROUP). Every thread of a subscription receives messages and handles them itself, so no received message
waits for a thread.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextvars import Context, copy_context
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from typing import Any, Final

from outbox import passing_over, tracing
from outbox.codec import Codecs
from outbox.errors import (
    BrokerUnavailable,
    ConfigurationError,
    HandlerNotStarted,
    KillsItsProcess,
    LeaseLost,
    NeedsNewerCode,
    ServiceUnavailable,
    UndecodableBody,
)
from outbox.filters.filter import parse_filter
from outbox.message import Delivery, Message, afresh
from outbox.ports import AnyHandler, ConsumeCounts, Disposition, Invoker, call_handler
from outbox.retry import code_wait_seconds
from outbox.rocketmq import client
from outbox.rocketmq.address import parse
from outbox.rocketmq.declarations import REFUSALS, in_namespace, wire_name
from outbox.rocketmq.wire import from_wire
from outbox.subscription import OnError, Subscription
from outbox.time_limit import ends_at
from outbox.topic import Topic
from outbox.utils import fence, given_up, log_context, measures
from outbox.utils.backoff import Backoff
from outbox.utils.refused_connections import is_refused
from outbox.utils.safe_text import error_line, printable, shown_text

logger = logging.getLogger(__name__)

# The proxy refuses a wait for messages of less than 5 s, and an invisible time of less than 10 s.
_WAIT_SECONDS: Final = 5
INVISIBLE_SECONDS: Final = 15
_RENEW_SECONDS: Final = INVISIBLE_SECONDS / 3
_KNOWN_SECONDS: Final = 5.0
_AWAY_SECONDS: Final = 1.0
_LONGEST_SECONDS: Final = 12 * 3600
_BACKOFF: Final = Backoff(first_seconds=0.2, longest_seconds=10.0, factor=2)
# The generation is the same on both engines, so the inbox stays valid when a project moves to the other engine.
_GENERATION: Final = 1


@dataclass(frozen=True, slots=True)
class _Held:
    """A received and decoded message.

    The consumer must acknowledge the message, set a delay for the next attempt, or give the message up.
    """

    wire: Any
    delivery: Delivery


@dataclass(slots=True)
class Attempt:
    """One call of the handler and its time limit."""

    seconds: float
    ends_at: float = 0.0

    def begin(self) -> None:
        """Start the time limit again."""
        self.ends_at = time.monotonic() + self.seconds

    def is_over(self) -> bool:
        """Whether the time limit has passed."""
        return time.monotonic() >= self.ends_at

    def lost(self) -> str:
        """Return the reason why the effects of the attempt no longer count, or '' if they count."""
        return f"the handler ran longer than {self.seconds:g} s" if self.is_over() else ""


@dataclass(slots=True)
class Extended:
    """A message that the consumer keeps invisible until the attempt ends or the message is released."""

    wire: Any
    attempt: Attempt
    released: bool = False
    extending: threading.Lock = field(default_factory=threading.Lock)


class RocketMQConsumers:
    """The subscriptions of one process (implements outbox.ports.Consumers).

    Raises ConfigurationError for a subscription that RocketMQ cannot serve.

    `invoker` must include an inbox, because the server may deliver a message twice (docs/engines.md). `note` stores
    the error of a dead letter, which RocketMQ does not store.
    """

    def __init__(
        self,
        url: str,
        subscriptions: Sequence[tuple[Subscription, AnyHandler]],
        *,
        topics: Sequence[Topic] = (),
        invoker: Invoker = call_handler,
        codecs: Codecs | None = None,
        on_tick: Callable[[], None] | None = None,
        note: given_up.Listener | None = None,
    ) -> None:
        declared = {topic.name: topic for topic in topics}
        for subscription, _ in subscriptions:
            for refused in REFUSALS.of_subscription(subscription, declared.get(subscription.topic)):
                raise ConfigurationError(refused)
        self._on_tick = on_tick
        configuration, address = client.configuration(url), parse(url)
        self._pollers = [
            _Poller(
                configuration,
                subscription,
                handler,
                observed(invoker),
                codecs or Codecs(),
                tls=address.tls_to_proxy,
                namespace=address.namespace,
                note=note,
            )
            for subscription, handler in subscriptions
        ]

    def run(self, stop: threading.Event) -> None:
        """Consume until `stop` is set, then wait for the running handlers.

        Raises BrokerUnavailable if consuming cannot start.
        """
        client.refuse_after_fork()
        started: list[_Poller] = []
        try:
            for poller in self._pollers:
                poller.start(stop)
                started.append(poller)
            due = time.monotonic() + _KNOWN_SECONDS
            while not stop.wait(1.0):
                if self._on_tick is not None:
                    self._on_tick()
                if time.monotonic() >= due:
                    for poller in started:
                        poller.keep_known()
                    due = time.monotonic() + _KNOWN_SECONDS
        finally:
            stop.set()
            for poller in started:
                poller.finish()

    def run_once(self) -> ConsumeCounts:
        """Raise NotSupported, because RocketMQ does not report which messages are due now."""
        REFUSALS.refuse("run_once", "handling the messages that are due now")


class _Poller:
    """One subscription: its RocketMQ client, its threads for handlers, and the thread that keeps messages invisible."""

    def __init__(
        self,
        configuration: Any,
        subscription: Subscription,
        handler: AnyHandler,
        invoker: Invoker,
        codecs: Codecs,
        *,
        tls: bool,
        namespace: str,
        note: given_up.Listener | None,
    ) -> None:
        self._configuration = configuration
        self._subscription = subscription
        self._handler = handler
        self._invoker = invoker
        self._decode = subscription.decoder(codecs.decode)
        self._tls = tls
        self._namespace = namespace
        self._note = note
        self._filter = parse_filter(subscription.filter)
        self._threads: list[threading.Thread] = []
        self._held: dict[int, Extended] = {}
        self._lock = threading.Lock()
        self._finished = threading.Event()
        self._stopping = threading.Event()
        self._consumer: Any = None

    # -- threads --------------------------------------------------------------------------------

    def start(self, stop: threading.Event) -> None:
        """Start the threads. Raises BrokerUnavailable."""
        self._stopping = stop
        topic, group = self._named(self._subscription.topic), self._named(self._subscription.group)
        self._consumer = client.KnownConsumer(
            self._configuration, group, topic, await_seconds=_WAIT_SECONDS, tls=self._tls
        )
        try:
            self._consumer.startup()
            self._consumer.wait_until_known()
        except Exception as error:
            raise BrokerUnavailable(
                f"group {self._subscription.group!r} cannot consume: {client.described(error)}."
            ) from error
        names = [f"outbox-{self._subscription.group}-{number}" for number in range(self._subscription.threads)]
        self._threads = [threading.Thread(target=self._consume, name=name, daemon=True) for name in names]
        renewing = threading.Thread(target=self._renew, name=f"outbox-{self._subscription.group}-renew", daemon=True)
        for thread in (*self._threads, renewing):
            thread.start()

    def _named(self, name: str) -> str:
        return in_namespace(self._namespace, wire_name(name))

    def keep_known(self) -> None:
        """Announce the client again (see client.keep_known)."""
        client.keep_known(self._consumer)

    def finish(self) -> None:
        """Wait for the running handlers, at most until their timeout. Then stop."""
        deadline = time.monotonic() + self._subscription.timeout_seconds + _WAIT_SECONDS
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        self._finished.set()
        self._consumer.shutdown()

    def _consume(self) -> None:
        failures = 0
        while not self._stopping.is_set():
            try:
                received = self._consumer.receive(self._subscription.batch, INVISIBLE_SECONDS)
                failures = 0
            except Exception as error:
                failures += 1
                # If several receives in a row fail, each thread logs only its first failure as a warning.
                logger.log(
                    logging.WARNING if failures == 1 else logging.DEBUG,
                    "group %r cannot receive from topic %r and tries again: %s",
                    self._subscription.group,
                    self._subscription.topic,
                    client.described(error),
                )
                self._stopping.wait(_BACKOFF.pause_seconds(failures))
                continue
            if received:
                # Context variables that a handler leaves behind must not reach the next message of this thread.
                Context().run(self._handle, received)

    def _renew(self) -> None:
        """Extend the invisible time of messages whose handlers run, until the handlers' time limit."""
        while not self._finished.wait(_RENEW_SECONDS):
            with self._lock:
                held = list(self._held.values())
            for one in held:
                with one.extending:
                    if not one.released and not one.attempt.is_over():
                        self._extend(one.wire)

    def _extend(self, wire: Any) -> None:
        try:
            self._consumer.change_invisible_duration(wire, INVISIBLE_SECONDS)
        except Exception as error:
            logger.info(
                "the invisible time of message %s could not be extended, so it may be delivered again: %s",
                wire.message_id,
                client.described(error),
            )

    # -- handling -------------------------------------------------------------------------------

    def _handle(self, received: Sequence[Any]) -> None:
        attempt = Attempt(self._subscription.timeout_seconds)
        attempt.begin()
        with self._lock:
            self._held.update({id(wire): Extended(wire, attempt) for wire in received})
        try:
            if held := list(self._all_decoded(received, attempt)):
                with fence.attempt(attempt.lost):
                    self._call(held, attempt)
        except Exception as error:
            # After its invisible time, an unacknowledged message becomes visible again without an action of the
            # consumer.
            logger.error(
                "group %r failed at %r", self._subscription.group, self._subscription.topic, exc_info=printable(error)
            )
        finally:
            for wire in received:
                self._release(wire)

    def _all_decoded(self, received: Sequence[Any], attempt: Attempt) -> Iterator[_Held]:
        for wire in received:
            try:
                held = self._decoded(wire, attempt)
            except HandlerNotStarted:
                # This process stops. The message and the later ones, which may have its key, stay unacknowledged, so
                # the server delivers them again in their order.
                return
            if held is not None:
                yield held

    def _decoded(self, wire: Any, attempt: Attempt) -> _Held | None:
        """Decode a message. If the message needs no handler, release it and return None.

        Raises HandlerNotStarted if this process stops while the message waits for its body.
        """
        try:
            message = from_wire(wire)
        except Exception as error:
            self._let_go(wire, error, wire.delivery_attempt or 1, f"RocketMQ's message {wire.message_id}")
            return None
        limit = self._subscription.retry.max_attempts
        if limit is not None and (wire.delivery_attempt or 1) > limit:
            # The process that made the last allowed attempt died during this attempt, so no process reported the
            # failure.
            self._let_go(wire, KillsItsProcess(), wire.delivery_attempt, str(message.message_id))
            return None
        if self._is_over(wire, message):
            return None
        if not self._filter.evaluate(message.tag, message.headers):
            self._quietly(wire, partial(self._consumer.ack, wire))
            return None
        try:
            body = self._body(message, attempt)
        except UndecodableBody as error:
            self._let_go(wire, error, wire.delivery_attempt or 1, str(message.message_id))
            return None
        # The message may have waited for its body.
        if self._is_over(wire, message):
            return None
        return _Held(wire, self._delivery(message, body, wire))

    def _body(self, message: Message, attempt: Attempt) -> Any:
        """Return the body of a message. Wait while only newer code can read it, or what it needs does not answer.

        The message stays in this process, because a new delivery would use up an attempt. Raises UndecodableBody, or
        HandlerNotStarted if this process stops.
        """
        while True:
            try:
                return self._decode(message)
            except HandlerNotStarted as error:
                logger.warning(
                    "group %r: message %s waits: %s", self._subscription.group, message.message_id, shown_text(error)
                )
                pause = _AWAY_SECONDS
                if isinstance(error, NeedsNewerCode):
                    pause = code_wait_seconds(datetime.now(UTC), message.born_at)
                if self._stopping.wait(min(pause, self._subscription.timeout_seconds / 2)):
                    raise
                attempt.begin()

    def _is_over(self, wire: Any, message: Message) -> bool:
        """Acknowledge the message if its time limit is over, and return whether it is."""
        if not self._is_timed_out(message):
            return False
        logger.info("group %r: message %s is timed out", self._subscription.group, message.message_id)
        self._quietly(wire, partial(self._consumer.ack, wire))
        return True

    def _is_timed_out(self, message: Message) -> bool:
        """Whether the time limit of the message is over, by this machine's clock.

        The client library does not report when the server stored the message, so the limit counts from the time at
        which the producer built the message.
        """
        end = ends_at(message.headers, message.born_at, message.deliver_at)
        return end is not None and datetime.now(UTC) >= end

    def _delivery(self, message: Message, body: Any, wire: Any) -> Delivery:
        return Delivery(
            message=message,
            body=body,
            group=self._subscription.group,
            queue=self._subscription.topic,
            # The library does not report the offset of a message.
            offset=-1,
            attempt=wire.delivery_attempt or 1,
            _decode=self._decode,
        )

    def _call(self, held: Sequence[_Held], attempt: Attempt) -> None:
        deliveries = [one.delivery for one in held]
        results = self._invoked(deliveries, attempt)
        first = results[0]
        if len(results) > 1 and isinstance(first, Exception) and all(result is first for result in results):
            # Halve the batch until the failing message is alone.
            middle = (len(held) + 1) // 2
            again = [replace(one, delivery=new) for one, new in zip(held, afresh(deliveries), strict=True)]
            self._call(again[:middle], attempt)
            self._call(again[middle:], attempt)
            return
        for one, result in zip(held, results, strict=True):
            if isinstance(result, Disposition):
                self._quietly(one.wire, partial(self._consumer.ack, one.wire))
            else:
                self._let_go(one.wire, result, one.delivery.attempt, str(one.delivery.message_id))

    def _invoked(self, deliveries: Sequence[Delivery], attempt: Attempt) -> Sequence[Disposition | Exception]:
        """Call the invoker and return its results.

        While a database or a service is down, the messages stay in this process, because a new delivery would use up an
        attempt.
        """
        while True:
            call = copy_context()
            results = self._subscription.contained(
                call.run(self._invoker, self._subscription, self._handler, deliveries, generation=_GENERATION)
            )
            if passing_over.is_to_pass(deliveries, results):
                passing_over.report(deliveries, results[0])
                return self._invoker(self._subscription, passing_over.do_nothing, deliveries, generation=_GENERATION)
            away = results[0]
            if not _is_away(away) or any(one is not away for one in results):
                return results
            logger.warning("group %r waits: %s", self._subscription.group, shown_text(away))
            pause = getattr(away, "pause_seconds", None) or _AWAY_SECONDS
            if self._stopping.wait(min(pause, self._subscription.timeout_seconds / 2)):
                return results
            attempt.begin()
            deliveries = afresh(deliveries)

    def _let_go(self, wire: Any, error: Exception, attempt: int, what: str) -> None:
        """Set the delay before the next delivery of a failed message, or give the message up."""
        subscription = self._subscription
        reaction = subscription.reaction(error)
        text = error_line(error)
        if _is_away(error) or isinstance(error, LeaseLost):
            # With LeaseLost, the attempt may have committed: the inbox of the next one knows.
            seconds = 0.0
        elif reaction is OnError.DEAD_LETTER or subscription.retry.exhausted(attempt):
            logger.error("group %r gives up %s after attempt %d: %s", subscription.group, what, attempt, text)
            self._quietly(wire, partial(self._give_up, wire, attempt, text))
            return
        else:
            seconds = subscription.retry_delay_seconds(error, attempt)
        logger.warning("group %r failed at %s in attempt %d: %s", subscription.group, what, attempt, text)
        delay = min(max(1, math.ceil(seconds)), _LONGEST_SECONDS)
        self._quietly(wire, partial(self._consumer.change_invisible_duration, wire, delay))

    def _give_up(self, wire: Any, attempt: int, error: str) -> None:
        letter = self._letter(wire, attempt, error)
        if letter is not None and self._note is not None:
            # Note the error first: if this process dies after the server has stored the dead letter, no other process
            # knows the error.
            self._note(letter)
        request = client.ForwardMessageToDeadLetterQueueRequest()
        request.group.name = self._consumer.consumer_group
        request.topic.name = wire.topic
        request.receipt_handle = wire.receipt_handle
        request.message_id = wire.message_id
        request.delivery_attempt = wire.delivery_attempt or 1
        request.max_delivery_attempts = wire.delivery_attempt or 1
        answer = self._consumer.rpc_client.forward_message_to_dead_letter_queue_async(
            wire.endpoints,
            request,
            metadata=self._consumer.sign(),
            timeout=self._consumer.client_configuration.request_timeout,
        ).result()
        client.MessagingResultChecker.check(answer.status)
        if letter is not None and given_up.listener is not None:
            given_up.listener(letter)

    def _letter(self, wire: Any, attempt: int, error: str) -> given_up.GivenUp | None:
        """Return what is known about a dead letter, or None if another client published an unreadable message."""
        try:
            message = from_wire(wire)
        except Exception as unreadable:
            logger.info(
                "RocketMQ's message %s is not readable and has no id: %s", wire.message_id, shown_text(unreadable)
            )
            return None
        return given_up.GivenUp(
            group=self._subscription.group,
            topic=message.topic,
            key=message.key,
            message_id=message.message_id,
            attempts=attempt,
            error=error,
        )

    def _quietly(self, wire: Any, request: Callable[[], object]) -> None:
        """Release a message, then send `request`; if the request fails, only log the error.

        After a lost request, the server delivers the message again, and the inbox recognises a handled message.
        """
        self._release(wire)
        try:
            request()
        except Exception as error:
            logger.info(
                "the result for message %s could not be sent, so it is delivered again: %s",
                wire.message_id,
                client.described(error),
            )

    def _release(self, wire: Any) -> None:
        """Stop extending the invisible time of a message.

        The acknowledgement needs the message's receipt, and an extension would replace this receipt.
        """
        with self._lock:
            held = self._held.pop(id(wire), None)
        if held is not None:
            with held.extending:
                held.released = True


def observed(invoker: Invoker) -> Invoker:
    """Return an invoker that calls `invoker` and records log context, span and metrics of each call."""

    def invoke(
        subscription: Subscription, handler: AnyHandler, deliveries: Sequence[Delivery], *, generation: int
    ) -> Sequence[Disposition | Exception]:
        started = time.time()
        with log_context.handling(deliveries):
            if tracing.tracer is None:
                results = invoker(subscription, handler, deliveries, generation=generation)
            else:
                with tracing.tracer.handling(deliveries) as conclude:
                    results = invoker(subscription, handler, deliveries, generation=generation)
                    conclude(results)
        if measures.recorder is not None:
            failures = [result for result in results if isinstance(result, BaseException)]
            waited = [started - _ready_at(delivery) for delivery in deliveries if delivery.attempt == 1]
            took, count = time.time() - started, len(deliveries)
            measures.recorder.handled(
                subscription.group, subscription.topic, waited, took, count=count, failures=failures
            )
        return results

    return invoke


def _is_away(error: object) -> bool:
    """Whether a database or a service is down, so that no attempt is used up."""
    return isinstance(error, (HandlerNotStarted, ServiceUnavailable)) or (
        isinstance(error, Exception) and is_refused(error)
    )


def _ready_at(delivery: Delivery) -> float:
    return (delivery.message.deliver_at or delivery.message.born_at).timestamp()
