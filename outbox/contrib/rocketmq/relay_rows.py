"""The rows of the relay (table outbox_relay): messages for RocketMQ that are not half messages.

The publishing transaction inserts a row, so the row exists if and only if the transaction commits. The relay
(outbox/contrib/rocketmq/relaying.py) sends the messages of one line one after the other, and deletes a row after
RocketMQ has confirmed its message. A line is the key of a FIFO topic, or a single message without an order.

See decision 290.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final
from uuid import UUID

from django.db import connections
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.models import Count, F, Min, Q, QuerySet
from django.db.models.functions import Now
from django.db.utils import OperationalError, ProgrammingError

from outbox.contrib.django.database.transactions import is_missing_table
from outbox.contrib.django.ledger.ledger_checker import ledger_aliases, open_connection
from outbox.contrib.django.operations.personal_data import Rows, Scope, saved
from outbox.contrib.django.settings.conf import aware, for_column
from outbox.erased import ERASED_CONTENT_TYPE, ERASED_TEXT, kept_headers
from outbox.errors import ConfigurationError
from outbox.message import Message, SendReceipt

if TYPE_CHECKING:
    from outbox.contrib.rocketmq.models import RelayEntry

# The rows of one INSERT. A larger number needs more parameters than PostgreSQL and SQLite allow.
_ROWS: Final = 500

# The tables (alias, oid) that a new connection of the alias has reached.
_reachable: Final[set[tuple[str, int | None]]] = set()


@dataclass(frozen=True, kw_only=True, slots=True)
class RelayBacklog:
    """The messages of one database that wait for the relay. `oldest_at`: when the oldest of them was published."""

    alias: str
    waiting: int = 0
    oldest_at: datetime | None = None
    parked: int = 0


def relay_aliases() -> list[str]:
    """The aliases that have the table. An alias of another broker may have none."""
    return [
        alias
        for alias in ledger_aliases(usable=True)
        if "outbox_relay" in connections[alias].introspection.table_names()
    ]


def rows_on(alias: str) -> QuerySet[RelayEntry]:
    """The rows of one database. A database router of the project does not change the alias."""
    # A child process imports this module before Django is set up, so models cannot be imported with it.
    from outbox.contrib.rocketmq.models import RelayEntry

    return RelayEntry._base_manager.using(alias)


def store(
    connection: BaseDatabaseWrapper, messages: Sequence[Message], ordered: Sequence[bool], *, transaction_id: UUID
) -> list[SendReceipt]:
    """Insert the messages in the open transaction, in this order. Returns their receipts.

    `ordered` says for each message whether the order of its key counts. The caller has locked these keys, so the
    numbers of one key rise in the order of commits. Raises ConfigurationError if the table is missing or the relay
    could not find it. Raises the errors of the database.
    """
    rows, now = rows_on(connection.alias), datetime.now(UTC)
    entries = [
        rows.model(
            line=_line(item, in_order=in_order),
            message_id=item.message_id,
            transaction_id=transaction_id,
            topic=item.topic,
            key=item.key,
            tag=item.tag,
            headers=dict(item.headers),
            content_type=item.content_type,
            body=item.body,
            size=len(item.body),
            born_at=for_column(item.born_at, connection.alias),
            deliver_at=None if (due := _due(item, now)) is None else for_column(due, connection.alias),
        )
        for item, in_order in zip(messages, ordered, strict=True)
    ]
    try:
        rows.bulk_create(entries, batch_size=_ROWS)
        if connection.vendor == "postgresql":
            _refuse_unreachable(connection)
    except (ProgrammingError, OperationalError) as error:
        if not is_missing_table(error):
            raise
        raise ConfigurationError(
            f"the relay's tables are missing on {connection.alias!r}: run `manage.py migrate "
            f"--database={connection.alias}`. Nothing was published."
        ) from error
    return [
        SendReceipt(message_id=item.message_id, transaction_id=transaction_id, topic=item.topic) for item in messages
    ]


def _refuse_unreachable(connection: BaseDatabaseWrapper) -> None:
    """Refuse a search path that leads to another table than the relay's own connection reads."""
    alias, table = connection.alias, _table(connection)
    if (alias, table) in _reachable:
        return
    with closing(open_connection(alias)) as outside:
        found = _table(outside)
    if found != table:
        raise ConfigurationError(
            f"the search_path of this connection leads to another table outbox_relay than a new connection of "
            f"{alias!r}, which the relay uses. Keep outbox_relay only in one schema that is on every search_path "
            f"(public), or give each schema an alias of its own in DATABASES. Nothing was published."
        )
    _reachable.add((alias, table))


def _table(connection: BaseDatabaseWrapper) -> int | None:
    with connection.cursor() as cursor:
        cursor.execute("SELECT to_regclass('outbox_relay')::oid")
        [oid] = cursor.fetchone()
        return None if oid is None else int(oid)


def _due(message: Message, now: datetime) -> datetime | None:
    return message.deliver_at if message.delay is None else now + message.delay


def _line(message: Message, *, in_order: bool) -> int:
    text = f"{message.topic}\x00{message.key}" if in_order else str(message.message_id)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), signed=True)


def message_of(alias: str, row: RelayEntry) -> Message:
    """The message of a row, with an absolute delivery time. Raises InvalidMessage."""
    return Message(
        topic=row.topic,
        body=bytes(row.body),
        message_id=row.message_id,
        key=row.key,
        tag=row.tag,
        headers=row.headers,
        content_type=row.content_type,
        born_at=_in_utc(alias, row.born_at),
        deliver_at=None if row.deliver_at is None else _in_utc(alias, row.deliver_at),
    )


def _in_utc(alias: str, moment: datetime) -> datetime:
    if moment.tzinfo is None and connections[alias].vendor != "postgresql":
        # Without USE_TZ, `for_column` stores UTC on these databases.
        return moment.replace(tzinfo=UTC)
    return aware(moment).astimezone(UTC)


def is_stored(connection: BaseDatabaseWrapper, message_id: UUID) -> bool:
    """Whether the open transaction still has the row of a message that it has published."""
    return rows_on(connection.alias).filter(message_id=message_id).exists()


def remove_unsent(alias: str, message_id: UUID) -> list[RelayEntry]:
    """Delete the row of a message if no relay has taken it, and return the deleted row.

    The condition is part of the DELETE, so a relay that takes a row at the same time either finds no row, or keeps it.
    """
    removed = []
    for row in rows_on(alias).filter(message_id=message_id, taken_at=None).defer("body").order_by("sequence"):
        if rows_on(alias).filter(pk=row.pk, taken_at=None).delete()[0]:
            removed.append(row)
    return removed


def discard(alias: str, message_id: UUID) -> int:
    """Delete the parked row of a message, so that the later messages of its line are sent. Returns 1 or 0."""
    return rows_on(alias).filter(message_id=message_id, parked_at__isnull=False).delete()[0]


def retry(alias: str, message_id: UUID) -> int:
    """Let the relay send the parked row of a message again. Returns 1 or 0."""
    return (
        rows_on(alias)
        .filter(message_id=message_id, parked_at__isnull=False)
        .update(parked_at=None, due_at=Now(), attempts=0)
    )


def first_rows(alias: str, limit: int) -> list[RelayEntry]:
    """The parked rows and then the oldest waiting rows of a database, without their bodies."""
    return list(rows_on(alias).defer("body").order_by(F("parked_at").asc(nulls_last=True), "sequence")[:limit])


def backlog(alias: str) -> RelayBacklog:
    """Count the rows of a database; a missing table has no rows. Raises the errors of the database."""
    try:
        found = rows_on(alias).aggregate(
            waiting=Count("pk", filter=Q(parked_at=None)),
            parked=Count("pk", filter=Q(parked_at__isnull=False)),
            oldest=Min("born_at", filter=Q(parked_at=None)),
        )
    except (ProgrammingError, OperationalError) as error:
        if not is_missing_table(error):
            raise
        return RelayBacklog(alias=alias)
    oldest = found["oldest"]
    return RelayBacklog(
        alias=alias,
        waiting=found["waiting"],
        parked=found["parked"],
        oldest_at=None if oldest is None else _in_utc(alias, oldest),
    )


def erase_relayed(rows: Rows, scope: Scope) -> int:
    """Erase messages that wait for the relay. The relay sends them as erased messages, with their ids."""

    def is_of_message(row: Any) -> bool:
        has_key = row.topic == scope.topic and scope.key is not None and row.key == scope.key
        return has_key or row.message_id in scope.message_ids

    def erased(row: Any) -> dict[str, Any]:
        if not is_of_message(row):
            return {"error": scope.cleaned(row.error)}
        return {
            "content_type": ERASED_CONTENT_TYPE,
            # RocketMQ refuses an empty body.
            "body": b"0",
            "size": 1,
            "key": scope.replacement if scope.replacement and row.key == scope.key else row.key,
            "headers": kept_headers(row.headers),
            "error": row.error and ERASED_TEXT,
        }

    return saved(
        rows,
        lambda row: (is_of_message(row) and row.content_type != ERASED_CONTENT_TYPE) or scope.mentions(row.error),
        erased,
    )
