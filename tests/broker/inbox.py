"""An Invoker with an inbox in PostgreSQL, as an application without Django would write it."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import psycopg

from outbox.errors import PartialFailure
from outbox.message import Delivery
from outbox.ports import AnyHandler, Disposition
from outbox.subscription import Subscription
from outbox.utils import faults, fence

_CLAIM = """
INSERT INTO inbox (consumer_group, generation, message_id)
SELECT %s, %s, id FROM unnest(%s::uuid[]) AS id ORDER BY id
ON CONFLICT DO NOTHING RETURNING message_id
"""


class InboxInvoker:
    """Runs a handler in a transaction with the inbox rows of its messages; `connection` is the handler's own.

    `once=False` leaves the inbox out, so that repeated deliveries show. `idle_seconds` belongs below the lease term:
    a frozen owner must not block the next one on its inbox row.
    """

    def __init__(self, url: str, *, once: bool = True, idle_seconds: float = 1.0) -> None:
        self._idle_milliseconds = round(idle_seconds * 1000)
        self._url = url
        self._once = once
        self._local = threading.local()
        self._opened: list[psycopg.Connection[tuple[object, ...]]] = []

    def close(self) -> None:
        """Close the connections of all threads."""
        for connection in self._opened:
            connection.close()

    @property
    def connection(self) -> psycopg.Connection[tuple[object, ...]]:
        if not hasattr(self._local, "connection") or self._local.connection.closed:
            self._local.connection = psycopg.connect(self._url, autocommit=True)
            self._opened.append(self._local.connection)
            self._local.connection.execute(
                "SELECT set_config('idle_in_transaction_session_timeout', %s, false)", [str(self._idle_milliseconds)]
            )
        connection: psycopg.Connection[tuple[object, ...]] = self._local.connection
        return connection

    def __call__(
        self, subscription: Subscription, handler: AnyHandler, deliveries: Sequence[Delivery], *, generation: int
    ) -> Sequence[Disposition | Exception]:
        try:
            fresh = self._run(subscription, handler, deliveries, generation)
        except PartialFailure as partial:
            return [partial.errors.get(d.message_id, Disposition.HANDLED) for d in deliveries]
        except Exception as error:
            return [error] * len(deliveries)
        return [Disposition.HANDLED if d.message_id in fresh else Disposition.SKIPPED for d in deliveries]

    def _run(
        self, subscription: Subscription, handler: AnyHandler, deliveries: Sequence[Delivery], generation: int
    ) -> set[object]:
        ids = [delivery.message_id for delivery in deliveries]
        with self.connection.transaction():
            fresh: set[object] = set(ids)
            if self._once:
                rows = self.connection.execute(_CLAIM, [subscription.group, generation, ids]).fetchall()
                fresh = {row[0] for row in rows}
            wanted = [delivery for delivery in deliveries if delivery.message_id in fresh]
            if wanted:
                handler(wanted if subscription.batch > 1 else wanted[0])  # type: ignore[arg-type]
            faults.point("consumer.before_inbox_commit")
            fence.check()
        faults.point("consumer.after_inbox_commit")
        return fresh
