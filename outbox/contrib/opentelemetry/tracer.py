"""Spans of messages, named and described as OpenTelemetry's semantic conventions for messaging say.

request ─► publish orders ─┬─► commit orders          (the end message; or check_back orders)
                           ├─► process orders         (each group, each attempt)
                           └─◄┄ process orders        (a batch: linked to each of its messages)
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Final

from opentelemetry import propagate, trace
from opentelemetry.context import Context
from opentelemetry.trace import Link, Span, SpanKind, Status, StatusCode, TracerProvider
from opentelemetry.util.types import AttributeValue

from outbox.errors import InvalidMessage, InvalidName
from outbox.message import Delivery, Message
from outbox.tracing import Conclude
from outbox.transaction import Answer, Check, Decision, EndStatus, HalfTransaction

logger = logging.getLogger(__name__)

SYSTEM: Final = "outbox"
# Of a batch so many failures are recorded; the number of all is an attribute.
_RECORDED: Final = 5


class OpenTelemetryTracer:
    """Implements outbox.tracing.Tracer.

    Without `provider` it is the global one, also when that is set later; headers are those of the global propagator,
    by default W3C's `traceparent` and `tracestate`, and `baggage`.
    """

    def __init__(self, provider: TracerProvider | None = None) -> None:
        self._tracer = trace.get_tracer("outbox", tracer_provider=provider)

    @contextmanager
    def publishing(self, messages: Sequence[Message]) -> Iterator[Sequence[Message]]:
        """A span `publish TOPIC`, whose context the messages carry in place of any other.

        It is below the span that publishes; where there is none (a message received from elsewhere is stored), below
        what the first message carries.
        """
        inside = trace.get_current_span().get_span_context().is_valid
        with self._tracer.start_as_current_span(
            _name("publish", messages),
            context=None if inside else _context_of(messages[0]),
            kind=SpanKind.PRODUCER,
            attributes=_about("publish", "send", messages),
        ):
            carried: dict[str, str] = {}
            propagate.inject(carried)
            yield [_carrying(message, carried) for message in messages] if carried else messages

    @contextmanager
    def handling(self, deliveries: Sequence[Delivery]) -> Iterator[Conclude]:
        """A span `process TOPIC`: below what published the one message, or linked to what published several."""
        messages = [delivery.message for delivery in deliveries]
        first = deliveries[0]
        attributes = _about("process", "process", messages) | {"messaging.consumer.group.name": first.group}
        if len(deliveries) == 1:
            parent, links = _context_of(first.message), []
            attributes["messaging.destination.partition.id"] = first.queue
            attributes["messaging.outbox.delivery.attempt"] = first.attempt
        else:
            # A root of its own, whatever the thread did before: no message of a batch is the reason of all.
            parent, links = Context(), _links(messages)
        with self._tracer.start_as_current_span(
            _name("process", messages), context=parent, kind=SpanKind.CONSUMER, attributes=attributes, links=links
        ) as span:
            yield lambda outcomes: _conclude(span, outcomes)

    def decided(self, half: HalfTransaction, decision: Decision) -> None:
        """A moment `commit TOPIC` or `rollback TOPIC` below the publish span."""
        operation = decision.name.lower()
        self._tracer.start_span(
            _name(operation, half.messages),
            context=_context_of(half.messages[0]),
            kind=SpanKind.CLIENT,
            attributes=_about(operation, "settle", half.messages),
        ).end()

    def answered(self, check: Check, answer: Answer, status: EndStatus | None, *, asked_at_ns: int) -> None:
        """A span `check_back TOPIC` below the publish span, with the decision that it found."""
        attributes = _about("check_back", "settle", [check.message]) | {
            "messaging.outbox.producer_group.name": check.producer_group,
            "messaging.outbox.decision": answer.decision.name,
            "messaging.outbox.check.detail": answer.detail,
            "messaging.outbox.check.count": check.checks,
        }
        if status is not None:
            attributes["messaging.outbox.decision.status"] = status.value
        span = self._tracer.start_span(
            _name("check_back", [check.message]),
            context=_context_of(check.message),
            kind=SpanKind.CLIENT,
            attributes=attributes,
            start_time=asked_at_ns,
        )
        if answer.alarm:
            span.set_status(Status(StatusCode.ERROR, answer.detail))
        span.end()


def _name(operation: str, messages: Sequence[Message]) -> str:
    topics = {message.topic for message in messages}
    return f"{operation} {topics.pop()}" if len(topics) == 1 else operation


def _about(operation: str, kind: str, messages: Sequence[Message]) -> dict[str, AttributeValue]:
    """`kind` is one of the operation types that the conventions know."""
    first = messages[0]
    found: dict[str, AttributeValue] = {
        "messaging.system": SYSTEM,
        "messaging.operation.name": operation,
        "messaging.operation.type": kind,
    }
    if all(message.topic == first.topic for message in messages):
        found["messaging.destination.name"] = first.topic
    if len(messages) > 1:
        found["messaging.batch.message_count"] = len(messages)
        return found
    found["messaging.message.id"] = str(first.message_id)
    found["messaging.message.body.size"] = len(first.body)
    if first.key:
        found["messaging.outbox.message.key"] = first.key
    return found


def _carrying(message: Message, carried: Mapping[str, str]) -> Message:
    """With the context in its headers. Copied headers (of the message that is handled) do not lead elsewhere."""
    fields = propagate.get_global_textmap().fields
    kept = {name: value for name, value in message.headers.items() if name not in fields}
    try:
        return replace(message, headers={**kept, **carried})
    except (InvalidName, InvalidMessage) as error:
        # Somebody's propagator writes what is no header here; a message matters more than its trace.
        logger.debug("message %s travels without its trace: %s", message.message_id, error)
        return message


def _context_of(message: Message) -> Context:
    """What the headers say, and nothing of what this thread is in; empty when they say nothing valid."""
    try:
        return propagate.extract(message.headers, context=Context())
    except Exception as error:
        # Headers are what somebody sent, and propagators may be anybody's: a message matters more than its trace.
        logger.debug("the trace of message %s cannot be read from its headers: %s", message.message_id, error)
        return Context()


def _links(messages: Sequence[Message]) -> list[Link]:
    """To each publish call, once."""
    fields = propagate.get_global_textmap().fields
    carriers = {tuple(message.headers.get(field) for field in fields): message for message in messages}
    found = (trace.get_current_span(_context_of(message)).get_span_context() for message in carriers.values())
    once = {(context.trace_id, context.span_id): context for context in found if context.is_valid}
    return [Link(context) for context in once.values()]


def _conclude(span: Span, outcomes: Sequence[object]) -> None:
    failures = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
    if not failures or not span.is_recording():
        return
    first = failures[0]
    span.set_attribute("error.type", f"{type(first).__module__}.{type(first).__qualname__}")
    if len(outcomes) > 1:
        span.set_attribute("messaging.outbox.batch.failed_count", len(failures))
    for failure in dict.fromkeys(failures[:_RECORDED]):
        span.record_exception(failure)
    span.set_status(Status(StatusCode.ERROR, str(first)))
