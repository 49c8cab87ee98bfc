"""A handler that forwards in order per key. A message is finished after the endpoint has acknowledged it.

If the process dies after the acknowledgement and before the offset is stored, the message is sent again with its id.

If a client library cannot encode a message (`struct.error`, UnicodeEncodeError and other errors about data), the
message counts as rejected: tried again without an end, it would block its key for ever. See decision 125.
"""

from __future__ import annotations

import copy
import struct
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, Final
from uuid import UUID

from outbox.codec import REFERENCE_CONTENT_TYPE, Codecs, UnreadBody
from outbox.contrib.forwarding.sinks.sink import EarlierNotAcknowledged, Outgoing, Rejected, Sink
from outbox.erased import ERASED, ERASED_CONTENT_TYPE
from outbox.errors import HandlerNotStarted, PartialFailure, ServiceUnavailable, UndecodableBody
from outbox.message import Delivery
from outbox.retry import RetryPolicy
from outbox.subscription import Mode, OnError, Start, Subscription
from outbox.utils import fence
from outbox.utils.faults import point
from outbox.utils.safe_text import shown_text

Format = Callable[[Delivery, str], Outgoing]

# A rejected message is sent again at this interval, because the application at the endpoint may have been corrected.
SUSPEND_SECONDS: Final = 5.0
# If the storage of large bodies takes longer to fail, the other bodies of the call are not asked for.
_SLOW_SECONDS: Final = 1.0
# ValueError includes UnicodeError.
_ABOUT_DATA: Final = (ValueError, TypeError, LookupError, ArithmeticError, RecursionError, struct.error)


class RawCodecs(Codecs):
    """Codecs that leave bodies unchanged, so that a message that this process cannot decode is forwarded too."""

    def decode(self, content_type: str, data: bytes) -> Any:
        """Return the bytes unchanged, and ERASED for an erased message."""
        return ERASED if content_type == ERASED_CONTENT_TYPE else data


class Forwarder:
    """A handler that sends deliveries to a sink.

    `topic` is the name of the topic at the sink. `form` is the format of the sent messages. `unread` finds
    the body of a reference, because a receiver cannot read a reference; without it, a message with a reference waits.
    """

    def __init__(
        self,
        sink: Sink,
        topic: str,
        form: Format,
        unread: Callable[[bytes], UnreadBody] | None = None,
    ) -> None:
        self._sink = sink
        self._unread = unread
        self._topic = topic
        self._form = form

    def __call__(self, given: Delivery | Sequence[Delivery]) -> None:
        """Send all deliveries except erased ones, which have nothing to send.

        If the endpoint is unavailable, raises ServiceUnavailable. If deliveries of a batch fail, raises PartialFailure.
        If a single delivery fails, raises its error.
        """
        deliveries = [one for one in ([given] if isinstance(given, Delivery) else given) if not one.erased]
        lines = _lines(deliveries)
        failed: dict[UUID, Exception] = {}
        away: HandlerNotStarted | None = None
        while lines:
            wave = [line.popleft() for line in lines]
            first = len(failed) == 0 and len(wave) + _waiting(lines) == len(deliveries)
            errors, away = self._send(wave, first=first, away=away)
            for line, delivery, error in zip(lines, wave, errors, strict=True):
                if error is not None:
                    failed[delivery.message_id] = error
                    _hold_back(line, delivery, failed)
            lines = [line for line in lines if line]
        if failed:
            raise _verdict(deliveries, failed)

    def _send(
        self, wave: Sequence[Delivery], *, first: bool, away: HandlerNotStarted | None
    ) -> tuple[Sequence[Exception | None], HandlerNotStarted | None]:
        """Send deliveries that all have different keys. Return an error or None for each, and the new `away`.

        Raises LeaseLost if this process no longer owns the queue.

        `away`: why the storage of large bodies did not answer in time. Another question could take as long.
        """
        fence.check(commits=False)
        errors: list[Exception | None] = [None] * len(wave)
        ready: list[tuple[int, Outgoing]] = []
        for place, delivery in enumerate(wave):
            began = time.monotonic()
            try:
                if away is not None and delivery.message.content_type == REFERENCE_CONTENT_TYPE:
                    raise away
                ready.append((place, self._form(self._whole(delivery), self._topic)))
            except HandlerNotStarted as error:
                # The other messages are sent: what was acknowledged before would be sent again otherwise.
                errors[place] = error
                if time.monotonic() - began > _SLOW_SECONDS:
                    away = error
            except (ValueError, TypeError, RecursionError, UndecodableBody) as error:
                errors[place] = Rejected(
                    f"message {delivery.message_id} cannot be written in this format: {shown_text(error)}"
                )
        try:
            results = self._isolated([outgoing for _, outgoing in ready]) if ready else []
        except ServiceUnavailable as error:
            if first:
                raise
            results = [error] * len(ready)
        for (place, _), result in zip(ready, results, strict=True):
            errors[place] = result
        point("forward.after_acknowledgement")
        return errors, away

    def _whole(self, delivery: Delivery) -> Delivery:
        """Return the delivery with its large body. Raises MissingBody, ValueError or HandlerNotStarted."""
        if delivery.message.content_type != REFERENCE_CONTENT_TYPE:
            return delivery
        if self._unread is None:
            raise HandlerNotStarted(
                f"message {delivery.message_id} has a reference to its body, which this process cannot read. The "
                "message waits. Add the part with which it was published to INSTALLED_APPS."
            )
        unread = self._unread(delivery.message.body)
        # The limit of Message is about bodies that the broker stores.
        message = copy.copy(delivery.message)
        object.__setattr__(message, "body", unread.encoded())
        object.__setattr__(message, "content_type", unread.content_type)
        return replace(delivery, message=message)

    def _isolated(self, messages: Sequence[Outgoing]) -> Sequence[Exception | None]:
        """Send messages. If the sink raises an error about data, find the message that causes it.

        Client libraries raise such errors, below their own classes, for a message that they cannot encode. The message
        would fail again, so it counts as rejected. The other messages of the call are sent again, with the same ids,
        because the sink may have sent some of them.
        """
        try:
            return self._sink.send(messages)
        except _ABOUT_DATA as error:
            if len(messages) > 1:
                return [result for message in messages for result in self._isolated([message])]
            kind = type(error).__name__
            return [
                Rejected(f"message {messages[0].message_id} cannot be sent by this sink: {kind}: {shown_text(error)}")
            ]


def _lines(deliveries: Iterable[Delivery]) -> list[deque[Delivery]]:
    """Return one list of deliveries per key. The deliveries of one list must be sent one after the other.

    A message without a key has no order, so it gets a list of its own.
    """
    lines: dict[object, deque[Delivery]] = {}
    for delivery in deliveries:
        lines.setdefault(delivery.key or delivery.message_id, deque()).append(delivery)
    return list(lines.values())


def _waiting(lines: Iterable[Sequence[Delivery]]) -> int:
    return sum(map(len, lines))


def _hold_back(line: deque[Delivery], behind: Delivery, failed: dict[UUID, Exception]) -> None:
    while line:
        later = line.popleft()
        failed[later.message_id] = EarlierNotAcknowledged(
            f"not sent, because message {behind.message_id} of the same key {behind.key!r} was not acknowledged"
        )


def _verdict(deliveries: Sequence[Delivery], failed: dict[UUID, Exception]) -> Exception:
    """Return the error to raise.

    For a single delivery, return the error of this delivery, because several calls that fail with the same error are
    the sign of an outage.
    """
    return failed[deliveries[0].message_id] if len(deliveries) == 1 else PartialFailure(failed)


def subscription(
    group: str,
    topic: str,
    sink: Sink,
    *,
    dead_letter: bool = False,
    filter: str = "",
    batch: int | None = None,
    threads: int | None = None,
    timeout_seconds: float = 120.0,
    suspend_seconds: float = SUSPEND_SECONDS,
    start: Start = Start.EARLIEST,
) -> Subscription:
    """Return the subscription of a forwarding group: in order per key, with unlimited retries in place.

    A rejected message blocks its key. With `dead_letter` the rejected message becomes a dead letter, and the next
    messages of the key are sent.
    """
    return Subscription(
        group=group,
        topic=topic,
        mode=Mode.KEY_ORDERED,
        filter=filter,
        start=start,
        batch=batch or sink.batch,
        threads=threads or sink.threads,
        retry=RetryPolicy(delays_seconds=(1, 2, 5, 10, 20, 30, 60), max_attempts=None),
        on_error={Rejected: OnError.DEAD_LETTER if dead_letter else OnError.RETRY},
        suspend_seconds=suspend_seconds,
        timeout_seconds=timeout_seconds,
    )
