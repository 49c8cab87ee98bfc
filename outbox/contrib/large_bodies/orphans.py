"""Remove the objects of large bodies that no message needs: of removed, erased and never published messages.

A worker's pass `large_bodies` calls `remove_orphans`. See decision 265.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime, timedelta
from itertools import islice
from typing import Final
from uuid import UUID

import psycopg
from django.core.files.base import ContentFile
from django.core.files.storage import Storage
from django.utils import timezone

from outbox.broker.database.executor import Executor
from outbox.contrib.django.database.aliases import broker_executor
from outbox.contrib.django.settings.conf import get_settings
from outbox.contrib.large_bodies import locks
from outbox.contrib.large_bodies.objects import FOLDER, built_at, declared_bodies, name_of, storage_of
from outbox.contrib.large_bodies.settings import DeclaredLargeBodies
from outbox.erased import ERASED_CONTENT_TYPE
from outbox.errors import ConfigurationError
from outbox.utils.faults import point

# One turn of the pass ends after this number of seconds, because check-back waits on the same thread.
TURN_SECONDS: Final = 10.0
# Objects that one statement looks for in the log.
_BATCH: Final = 500
_OWNER: Final = f"{FOLDER}/owner"

# The last object that the previous turn has examined, by storage; a turn that ended early continues after it.
_places: dict[str, str] = {}


@dataclass(frozen=True, kw_only=True, slots=True)
class OrphanCounts:
    """The numbers of objects that one turn has examined and removed. `more`: the turn ended early."""

    examined: int = 0
    removed: int = 0
    more: bool = False


def run_once() -> Mapping[str, object]:
    """Run one turn of the pass, and return its counts."""
    return asdict(remove_orphans(max_seconds=TURN_SECONDS))


def remove_orphans(*, now: datetime | None = None, max_seconds: float | None = None) -> OrphanCounts:
    """Remove objects that are older than `keep_seconds` and have no message, and those of erased messages.

    A message in any state keeps its object: undecided, parked, held, scheduled, waiting for a retry, dead, or handled
    and not yet removed by retention. The first call only stores which broker owns the objects. Raises
    ConfigurationError if another broker owns them. Raises BrokerError, or an error of the storage.
    """
    declared = declared_bodies()
    if declared is None or not get_settings().has_database:
        return OrphanCounts()
    now, started = now or datetime.now(UTC), time.monotonic()
    storage = storage_of(declared)
    if not _is_owner(declared, storage):
        return OrphanCounts()
    place, examined, removed = _places.pop(declared.storage, ""), 0, 0
    found = _objects(storage, after=place)
    while ids := list(islice(found, _BATCH)):
        examined += len(ids)
        removed += _remove(declared, storage, ids, now)
        if max_seconds is not None and time.monotonic() - started > max_seconds:
            _places[declared.storage] = name_of(ids[-1])
            return OrphanCounts(examined=examined, removed=removed, more=True)
    return OrphanCounts(examined=examined, removed=removed)


def _is_owner(declared: DeclaredLargeBodies, storage: Storage) -> bool:
    """Whether the objects belong to this broker. Stores that they do if no broker owns them, and returns False.

    An empty or copied broker has no messages of these objects, so it would remove all.
    """
    with broker_executor() as run:
        mine = locks.owner(run)
    if not storage.exists(_OWNER):
        storage.save(_OWNER, ContentFile(mine.encode()))
        return False
    with storage.open(_OWNER, "rb") as file:
        found = file.read().decode(errors="replace")
    if found == mine:
        return True
    raise ConfigurationError(
        f"the large bodies in the storage {declared.storage!r} belong to the broker {found!r:.80}, and this broker is "
        f"{mine!r}. No object was removed. If another broker uses the storage, set another OUTBOX['LARGE_BODIES']"
        f"['storage']. If this broker was restored or replaces the other one, delete the object {_OWNER!r}."
    )


def _objects(storage: Storage, *, after: str) -> Iterator[UUID]:
    """Return the ids of all objects, the oldest first, from the one after the name `after`. Removes empty folders."""
    for day in _sorted(storage, FOLDER, folders=True):
        for hour in _sorted(storage, f"{FOLDER}/{day}", folders=True):
            folder = f"{FOLDER}/{day}/{hour}"
            if f"{folder}/~" <= after:
                continue
            for name in _sorted(storage, folder):
                if f"{folder}/{name}" > after and (found := _message_of(folder, name)) is not None:
                    yield found
            _remove_empty(storage, folder)
        _remove_empty(storage, f"{FOLDER}/{day}")


def _sorted(storage: Storage, folder: str, *, folders: bool = False) -> Sequence[str]:
    try:
        found, files = storage.listdir(folder)
    except FileNotFoundError:
        return ()
    return sorted(found if folders else files)


def _remove_empty(storage: Storage, folder: str) -> None:
    """Remove a folder of a file system if it is empty and no publisher can use it. Other storages have no folders."""
    if folder < f"{FOLDER}/{datetime.now(UTC) - timedelta(days=2):%Y-%m-%d}" and not any(storage.listdir(folder)):
        with contextlib.suppress(OSError):
            storage.delete(folder)


def _message_of(folder: str, name: str) -> UUID | None:
    """Return the message of an object; None for a file that outbox did not store."""
    try:
        found = UUID(name)
    except ValueError:
        return None
    return found if found.version == 7 and name_of(found) == f"{folder}/{name}" else None


def _remove(declared: DeclaredLargeBodies, storage: Storage, ids: Sequence[UUID], now: datetime) -> int:
    """Remove those of these objects that no message needs, and return their number."""
    oldest = now - timedelta(seconds=declared.keep_seconds)
    with broker_executor() as run:
        # The second look must see what was committed before the lock was taken, so its statement needs a snapshot of
        # its own, whatever the default of the database is.
        run.connection.isolation_level = psycopg.IsolationLevel.READ_COMMITTED
        by_bucket: dict[int, list[UUID]] = {}
        for one, is_erased in _unneeded(run, ids).items():
            if is_erased or _is_older(storage, one, oldest):
                by_bucket.setdefault(locks.bucket_of(one), []).append(one)
        count = 0
        for bucket, mine in by_bucket.items():
            with run.connection.transaction():
                if not locks.try_bucket(run, bucket):
                    continue
                for one in _unneeded(run, mine):
                    point("large_body.before_delete")
                    storage.delete(name_of(one))
                    count += 1
        return count


def _unneeded(run: Executor, ids: Sequence[UUID]) -> dict[UUID, bool]:
    """Return the ids without a message that refers to its object, and whether the message is there and erased."""
    stored = locks.content_types(run, ids)
    found = {one: stored.get(one, "") for one in ids}
    return {one: kind == ERASED_CONTENT_TYPE for one, kind in found.items() if kind in ("", ERASED_CONTENT_TYPE)}


def _is_older(storage: Storage, message_id: UUID, oldest: datetime) -> bool:
    """Whether the object is older by the publisher's clock and by the clock of the storage."""
    if built_at(message_id) >= oldest:
        return False
    try:
        changed = storage.get_modified_time(name_of(message_id))
    except FileNotFoundError:
        return False
    except NotImplementedError:
        return True
    return (timezone.make_aware(changed) if timezone.is_naive(changed) else changed) < oldest
