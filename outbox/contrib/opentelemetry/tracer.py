"""Spans of messages, named and described by OpenTelemetry's semantic conventions for messaging.

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
from outbox.utils.safe_text import class_path, printable, shown_text

logger = logging.getLogger(__name__)

SYSTEM: Final = "outbox"
# A span of a batch records at most this many failures. An attribute of the span has the total number.
_RECORDED: Final = 5


class OpenTelemetryTracer:
    """Implements outbox.tracing.Tracer.

    Without `provider` the tracer uses the global provider, even if the application sets the global provider later. The
    trace headers of messages come from the global propagator: by default W3C's `traceparent`, `tracestate` and
    `baggage`.
    """

    def __init__(self, provider: TracerProvider | None = None) -> None:
        self._tracer = trace.get_tracer("outbox", tracer_provider=provider)

    @contextmanager
    def publishing(self, messages: Sequence[Message]) -> Iterator[Sequence[Message]]:
        """Start a span `publish TOPIC`. The messages carry the context of this span only.

        The parent of this span is the span of the publishing code. If the publishing code has no span (a receiver that
        stores messages of another system), the parent is the context that the first message carries.
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
        """Start a span `process TOPIC`.

        For one message, this span is a child of the publish span. For a batch, this span has links to the publish
        spans.
        """
        messages = [delivery.message for delivery in deliveries]
        first = deliveries[0]
        attributes = _about("process", "process", messages) | {"messaging.consumer.group.name": first.group}
        if len(deliveries) == 1:
            parent, links = _context_of(first.message), []
            attributes["messaging.destination.partition.id"] = first.queue
            attributes["messaging.outbox.delivery.attempt"] = first.attempt
        else:
            # The span of a batch is a root span, because no single message causes the whole batch.
            parent, links = Context(), _links(messages)
        with self._tracer.start_as_current_span(
            _name("process", messages), context=parent, kind=SpanKind.CONSUMER, attributes=attributes, links=links
        ) as span:
            yield lambda outcomes: _conclude(span, outcomes)

    def decided(self, half: HalfTransaction, decision: Decision) -> None:
        """Record a span `commit TOPIC` or `rollback TOPIC`, without duration, as a child of the publish span."""
        operation = decision.name.lower()
        self._tracer.start_span(
            _name(operation, half.messages),
            context=_context_of(half.messages[0]),
            kind=SpanKind.CLIENT,
            attributes=_about(operation, "settle", half.messages),
        ).end()

    def answered(self, check: Check, answer: Answer, status: EndStatus | None, *, asked_at_ns: int) -> None:
        """Record a span `check_back TOPIC` with the decision, as a child of the publish span."""
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
    """Return the attributes of a span. `kind` is an operation type of OpenTelemetry's conventions."""
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
    """Return the message with the trace context in its headers.

    Trace headers that were copied from a handled message are replaced.
    """
    fields = propagate.get_global_textmap().fields
    kept = {name: value for name, value in message.headers.items() if name not in fields}
    try:
        return replace(message, headers={**kept, **carried})
    except (InvalidName, InvalidMessage) as error:
        # If a custom propagator writes an invalid header, the message is published without trace headers.
        logger.debug("message %s is published without trace headers: %s", message.message_id, error)
        return message


def _context_of(message: Message) -> Context:
    """Return the trace context that the message's headers contain. This thread's own context has no influence.

    If the headers contain no valid context, return an empty context.
    """
    try:
        return propagate.extract(message.headers, context=Context())
    except Exception as error:
        # Headers from another system, or a custom propagator, can cause any error. Handle the message without its
        # trace.
        logger.debug(
            "the trace of message %s cannot be read from its headers: %s", message.message_id, shown_text(error)
        )
        return Context()


def _links(messages: Sequence[Message]) -> list[Link]:
    """Return one link per publish call, even if the call published several of the messages."""
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
    span.set_attribute("error.type", class_path(first))
    if len(outcomes) > 1:
        span.set_attribute("messaging.outbox.batch.failed_count", len(failures))
    # By identity: an error may define `__eq__` without `__hash__`, as a dataclass does.
    for failure in {id(one): one for one in failures[:_RECORDED]}.values():
        span.record_exception(printable(failure))
    span.set_status(Status(StatusCode.ERROR, shown_text(first)))
