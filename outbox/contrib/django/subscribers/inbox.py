"""The inbox: a handler's effects and the row that records them commit together, so they happen once.

The inbox row is written first. A second delivery of the same message, even by another process at the same moment, waits
for the first one's transaction at the unique key and then finds the row: the handler is skipped.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from uuid import UUID

from django.db import connections, transaction
from django.db.utils import OperationalError

from outbox.contrib.django.database.blocks import watch_of
from outbox.contrib.django.database.contention import repeated
from outbox.contrib.django.subscribers.handler_connections import handler_alias, one_writer, refresh_connections
from outbox.contrib.django.subscribers.inbox_entries import InboxEntries
from outbox.contrib.django.subscribers.registry import Subscriber, find_subscriber
from outbox.errors import ConfigurationError, HandlerNotStarted, PartialFailure, PermanentError
from outbox.message import Delivery
from outbox.ports import AnyHandler, Disposition, call_handler
from outbox.subscription import Subscription
from outbox.utils import fence
from outbox.utils.faults import point
from outbox.utils.safe_text import masked_names, masked_text, show_as

logger = logging.getLogger(__name__)

Result = Disposition | Exception


class InboxInvoker:
    """Implements ports.Invoker for Django handlers: transaction, inbox, timeouts, replacement of broken connections."""

    def __init__(
        self, *, lease_seconds: float = 10.0, masked_fields: Mapping[str, frozenset[str]] = MappingProxyType({})
    ) -> None:
        self._lease_seconds = lease_seconds
        self._masked_fields = masked_fields

    def __call__(
        self, subscription: Subscription, handler: AnyHandler, deliveries: Sequence[Delivery], *, generation: int
    ) -> Sequence[Result]:
        results = self._results(subscription, handler, deliveries, generation)
        if self._masked_fields and (names := masked_names(self._masked_fields, subscription.topic)):
            contents = [content for one in deliveries for content in (one.body, one.headers)]
            for error in {id(one): one for one in results if isinstance(one, Exception)}.values():
                show_as(error, masked_text(str(error), contents, names))
        return results

    def _results(
        self, subscription: Subscription, handler: AnyHandler, deliveries: Sequence[Delivery], generation: int
    ) -> Sequence[Result]:
        registered = find_subscriber(subscription)
        refresh_connections()
        try:
            if registered is None or not registered.idempotent:
                return call_handler(subscription, handler, deliveries, generation=generation)
            with one_writer(connections[handler_alias(registered)]):
                return repeated(
                    partial(self._once, registered, subscription, handler, deliveries, generation), registered.name
                )
        except Exception as error:
            return [error] * len(deliveries)
        finally:
            refresh_connections()

    def _once(
        self,
        registered: Subscriber,
        subscription: Subscription,
        handler: AnyHandler,
        deliveries: Sequence[Delivery],
        generation: int,
    ) -> Sequence[Result]:
        connection = connections[handler_alias(registered)]
        inbox = InboxEntries(connection, subscription.group, generation)
        fresh: list[Delivery] | None = None
        failed: dict[UUID, Exception] = {}
        try:
            with transaction.atomic(using=connection.alias):
                entered = inbox.enter(deliveries, lease_seconds=self._lease_seconds)
                watch_of(connection).bind(registered.name)
                fresh = entered
                failed = _handle(subscription, handler, fresh)
                inbox.leave(failed)
                point("consumer.before_inbox_commit")
                fence.check()
                inbox.confirm([item for item in fresh if item.message_id not in failed], registered.name)
        except Exception as error:
            if fresh is None:
                raise _not_started(registered.name, connection.alias, error) from error
            stayed = inbox.still_there(fresh)
            if not stayed:
                raise
            if not inbox.is_confirmed:
                return [_half_done(registered.name, error) if d.message_id in stayed else error for d in deliveries]
            # The error came from an on_commit callback, or from a COMMIT that succeeded nevertheless.
            logger.exception("%s has committed; its later failure is not tried again", registered.name)
        point("consumer.after_inbox_commit")
        called = set(map(id, fresh))
        return [_result(delivery, id(delivery) in called, failed) for delivery in deliveries]


def _handle(subscription: Subscription, handler: AnyHandler, deliveries: Sequence[Delivery]) -> dict[UUID, Exception]:
    """Run the handler; returns the failures that a batch reports. Any other exception passes through and rolls back."""
    if not deliveries:
        return {}
    try:
        handler(deliveries if subscription.batch > 1 else deliveries[0])  # type: ignore[arg-type]
    except PartialFailure as partial:
        return {
            delivery.message_id: partial.errors[delivery.message_id]
            for delivery in deliveries
            if delivery.message_id in partial.errors
        }
    return {}


def _not_started(name: str, alias: str, error: Exception) -> HandlerNotStarted:
    return HandlerNotStarted(
        f"{name} was not called, because its transaction on {alias!r} could not begin: {type(error).__name__}: "
        f"{str(error).strip()}. This does not count as an attempt; the messages wait until it can."
    )


def _half_done(name: str, error: Exception) -> PermanentError:
    failure = PermanentError(
        f"{name} ended its transaction by hand (COMMIT) and then failed: {type(error).__name__}: {error}. Its "
        "committed effects stay, with the record that the message was handled, so no later attempt will run: "
        "complete the missing effects by hand. Leave COMMIT to the transaction that surrounds the handler."
    )
    failure.__cause__ = error
    return failure


def _result(delivery: Delivery, called: bool, failed: dict[UUID, Exception]) -> Result:
    if delivery.message_id in failed:
        return failed[delivery.message_id]
    return Disposition.HANDLED if called else Disposition.SKIPPED


def require_inboxes(subscriptions: Iterable[Subscription]) -> None:
    """Raise ConfigurationError if handlers need an inbox that no migration made: each message would fail.

    An unreachable database is no reason to end: its messages are tried again later.
    """
    from outbox.contrib.django.models import InboxEntry

    table = InboxEntry._meta.db_table
    registered = filter(None, map(find_subscriber, subscriptions))
    for alias in sorted({handler_alias(item) for item in registered if item.idempotent}):
        try:
            found = connections[alias].introspection.table_names()
        except OperationalError as error:
            logger.warning("whether %r has an inbox cannot be determined now: %s", alias, error)
            continue
        if table not in found:
            raise ConfigurationError(
                f"the table {table!r} is missing on {alias!r}, so handlers with the inbox cannot run: run `manage.py "
                f"migrate --database={alias}`. Nothing was consumed."
            )
