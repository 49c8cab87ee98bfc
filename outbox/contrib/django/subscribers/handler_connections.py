"""The database connections of the handlers' threads: kept, given back to a pool, or dropped between messages.

The threads are the runtime's, which knows nothing of Django and of requests that end.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

from django.db import connections, router
from django.db.backends.base.base import BaseDatabaseWrapper

from outbox.contrib.django.subscribers.registry import Subscriber

# psycopg_pool.ConnectionPool(min_size=4, max_size=None).
_POOL_SIZE: Final = 4


class _Closing:
    """Closes connections when it goes."""

    def __init__(self) -> None:
        self.connections: Sequence[BaseDatabaseWrapper] = ()

    def __del__(self) -> None:
        for connection in self.connections:
            with contextlib.suppress(Exception):
                connection.close()


class _OfThread(threading.local):
    """The connections of one handler thread, closed when the thread ends and its locals with it.

    Left alone, they would stay open until they are collected.
    """

    def __init__(self) -> None:
        self.closing = _Closing()


_of_thread = _OfThread()


def refresh_connections() -> None:
    """Give this thread's connections back to Django's pool, and drop those that are broken or past CONN_MAX_AGE.

    A pool has fewer connections than there are threads: one that was kept would be missing elsewhere. Without a pool,
    and unlike Django's close_old_connections, those of CONN_MAX_AGE = 0 are kept, which means "for one request": a
    worker that reconnected for every message would do little else. They go with their thread, once that is idle.
    """
    opened = _of_thread.closing.connections = connections.all(initialized_only=True)
    for connection in opened:
        if connection.connection is None or connection.in_atomic_block:
            continue
        expired = (
            bool(connection.settings_dict["CONN_MAX_AGE"])
            and connection.close_at is not None
            and time.monotonic() >= connection.close_at
        )
        broken = connection.errors_occurred and not connection.is_usable()
        if expired or broken or _has_pool(connection.settings_dict):
            connection.close()
        connection.errors_occurred = False


# A turn per file: the threads of a process need not find out by waiting in the dark, and losing.
_turns: Final[dict[str, threading.RLock]] = {}


@contextlib.contextmanager
def one_writer(connection: BaseDatabaseWrapper) -> Iterator[None]:
    """On SQLite, which has one writer at a time, let the handlers of this process take turns; elsewhere nothing.

    Left to SQLite, a handler that waits longer than `timeout` for the others would fail with "database is locked".
    """
    if connection.vendor != "sqlite":
        yield
        return
    with _turns.setdefault(str(connection.settings_dict["NAME"]), threading.RLock()):
        yield


def _has_pool(settings: Mapping[str, Any]) -> bool:
    return bool(settings["OPTIONS"].get("pool"))


def handler_alias(subscriber: Subscriber) -> str:
    """The alias of the transaction and the inbox of a subscriber."""
    from outbox.contrib.django.models import InboxEntry

    return subscriber.using or router.db_for_write(InboxEntry)


def pool_shortages(subscribers: Iterable[Subscriber]) -> Iterator[str]:
    """Where the handlers' threads of one consumer process outnumber the connections of a pool, in words."""
    handlers: dict[str, list[Subscriber]] = {}
    for item in subscribers:
        alias = handler_alias(item)
        if alias in connections and _has_pool(connections[alias].settings_dict):
            handlers.setdefault(alias, []).append(item)
    for alias, sharing in handlers.items():
        options = connections[alias].settings_dict["OPTIONS"]["pool"]
        given: Mapping[str, Any] = options if isinstance(options, Mapping) else {}
        size = given.get("max_size") or given.get("min_size", _POOL_SIZE)
        wanted = sum(item.subscription.threads for item in sharing)
        if wanted > size:
            each = ", ".join(f"{item.name} {item.subscription.threads}" for item in sharing)
            yield (
                f"the handlers of one consumer process have {wanted} threads on {alias!r} ({each}), and its connection "
                f"pool lends {size} connections: {wanted - size} threads wait for one, and a message whose thread "
                f"waits longer than the pool's timeout ({given.get('timeout', 30):g} s) has failed. Set "
                f"DATABASES[{alias!r}]['OPTIONS']['pool']['max_size'] = {wanted}, or give the subscribers threads=… "
                f"that add up to {size}."
            )
