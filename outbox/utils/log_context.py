"""Adds the id, key and topic of a message to the log records of handlers and of outbox itself.

    LOGGING = {
        "filters": {"outbox": {"()": "outbox.utils.log_context.MessageFilter"}},
        "formatters": {"line": {"format": "%(levelname)s %(message)s [%(outbox_message_id)s %(outbox_key)s]"}},
        "handlers": {"console": {"class": "logging.StreamHandler", "filters": ["outbox"], "formatter": "line"}},
        …

Attach the filter to a log handler, because the filter of a logger does not see the records of its child loggers.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Final
from uuid import UUID

from outbox.message import Delivery
from outbox.transaction import HalfTransaction

PREFIX: Final = "outbox_"
# The names of the attributes of a record, without the prefix.
FIELDS: Final = ("message_id", "transaction_id", "group", "topic", "key")

# A record names at most this many messages of a batch.
_NAMED: Final = 5

# A context variable has the same value in the handler, in the handler's asyncio tasks, and in the threads that asgiref
# starts for the handler.
_handled: ContextVar[Sequence[Delivery]] = ContextVar("outbox_handled", default=())


class MessageFilter(logging.Filter):
    """Gives every record the attributes `outbox_message_id`, `…transaction_id`, `…group`, `…topic` and `…key`.

    They are texts: empty if a record is about no message, the first few values of a batch separated by commas.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        """Add the attributes and return True, because this filter removes no record."""
        values = _of_deliveries(deliveries) if (deliveries := _handled.get()) else {}
        for field in FIELDS:
            name = PREFIX + field
            if not hasattr(record, name):
                setattr(record, name, values.get(field, ""))
        return True


def about(
    *,
    message_id: UUID | None = None,
    transaction_id: UUID | None = None,
    group: str = "",
    topic: str = "",
    key: str = "",
) -> dict[str, str]:
    """Return the argument `extra` of a log call about a message or transaction."""
    values = (message_id or "", transaction_id or "", group, topic, key)
    return {PREFIX + field: str(value) for field, value in zip(FIELDS, values, strict=True)}


def about_half(half: HalfTransaction) -> dict[str, str]:
    """Return the argument `extra` of a log call about a transaction, with the topic and key of its first message."""
    first = half.messages[0]
    ids = {"message_id": first.message_id, "transaction_id": first.message_id}
    return about(**ids, group=half.producer_group, topic=first.topic, key=first.key)


def suffix(record: logging.LogRecord) -> str:
    """Return the attributes that the filter has added, as a text for the end of a log line (` [key=o-1 …]`), or ''."""
    found = [f"{field}={value}" for field in FIELDS if (value := getattr(record, PREFIX + field, ""))]
    return f" [{' '.join(found)}]" if found else ""


# Does the same as `handling` until the present context (contextvars) ends.
begin: Final = _handled.set


@contextmanager
def handling(deliveries: Sequence[Delivery]) -> Iterator[None]:
    """Mark all log records that are written inside this block as records about these deliveries."""
    token = _handled.set(deliveries)
    try:
        yield
    finally:
        _handled.reset(token)


def is_handling() -> bool:
    """Whether the caller runs inside a handler."""
    return bool(_handled.get())


def _of_deliveries(deliveries: Sequence[Delivery]) -> dict[str, str]:
    first = deliveries[0]
    named = {name: _named(getattr(one, name) for one in deliveries) for name in ("message_id", "transaction_id", "key")}
    return {**named, "group": first.group, "topic": first.topic}


def _named(values: Iterable[object]) -> str:
    """Return the first few distinct values, separated by commas, and the number of values that are left out."""
    texts = list(dict.fromkeys(str(value) for value in values if value))
    more = [f"+{len(texts) - _NAMED}"] if len(texts) > _NAMED else []
    return ",".join(texts[:_NAMED] + more)
