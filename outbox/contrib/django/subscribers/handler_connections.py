"""The database connections of handler threads: kept, returned to a pool, or closed between messages.

The threads belong to the runtime, which has no Django requests that would close them.

See decision 075.
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
    """Closes its connections when it is deleted."""

    def __init__(self) -> None:
        self.connections: Sequence[BaseDatabaseWrapper] = ()

    def __del__(self) -> None:
        for connection in self.connections:
            with contextlib.suppress(Exception):
                connection.close()


class _OfThread(threading.local):
    """The connections of one handler thread, closed when the thread and its locals end.

    Otherwise they would stay open until the garbage collector finds them.
    """

    def __init__(self) -> None:
        self.closing = _Closing()


_of_thread = _OfThread()


def refresh_connections() -> None:
    """Return this thread's connections to Django's pool, and close those that are broken or past CONN_MAX_AGE.

    A pool may have fewer connections than there are threads, so keeping one would block another thread. Without a pool,
    connections with CONN_MAX_AGE = 0 are kept, unlike in Django's close_old_connections: that setting means "for one
    request", and a worker would otherwise reconnect for every message. They are closed with their thread when it is
    idle.
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


# A lock per file, so that the threads of a process wait for each other instead of failing in SQLite's busy loop.
_turns: Final[dict[str, threading.RLock]] = {}


@contextlib.contextmanager
def one_writer(connection: BaseDatabaseWrapper) -> Iterator[None]:
    """On SQLite, which has one writer at a time, let the handlers of this process take turns; on others, nothing.

    Without it, a handler that waits longer than `timeout` for the others would fail with "database is locked".
    """
    if connection.vendor != "sqlite":
        yield
        return
    with _turns.setdefault(str(connection.settings_dict["NAME"]), threading.RLock()):
        yield


def _has_pool(settings: Mapping[str, Any]) -> bool:
    return bool(settings["OPTIONS"].get("pool"))


def handler_alias(subscriber: Subscriber) -> str:
    """The alias of a subscriber's transaction and inbox."""
    from outbox.contrib.django.models import InboxEntry

    return subscriber.using or router.db_for_write(InboxEntry)


def pool_shortages(subscribers: Iterable[Subscriber]) -> Iterator[str]:
    """Warnings for each consumer process with more handler threads than connections in a pool."""
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
