"""The lock per FIFO key: taken in the local transaction before the log position is drawn, held until it ends."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Final

from django.db import transaction
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.utils import IntegrityError

from outbox.errors import InvalidMessage

# One statement; unnest() returns the numbers in their order.
_LOCK_POSTGRESQL: Final = "SELECT pg_advisory_xact_lock(number) FROM unnest(%s::bigint[]) AS number"
# A lock uses the server's shared memory until the transaction ends; 16,000 at once exhausted it.
MAX_KEYS: Final = 1_000

_LOCK_ROW: Final = "UPDATE outbox_key_lock SET taken = taken + 1 WHERE key_hash = %s"
_ADD_ROW: Final = "INSERT INTO outbox_key_lock (key_hash, taken) VALUES (%s, 0)"


def lock_keys(connection: BaseDatabaseWrapper, keys: Iterable[tuple[str, str]]) -> None:
    """Lock these (topic, key) pairs until the transaction ends, waiting if necessary.

    The pairs are sorted, so that two publish calls with the same keys do not deadlock. Raises InvalidMessage for more
    than MAX_KEYS of them.
    """
    numbers = sorted({_number(topic, key) for topic, key in keys})
    if len(numbers) > MAX_KEYS:
        raise InvalidMessage(
            f"{len(numbers)} different keys of FIFO topics in one call: each is locked until the transaction ends, "
            f"and the limit is {MAX_KEYS}. Nothing was published; publish fewer at a time, in transactions of their "
            "own, or declare the topic with key_lock=False if its order between transactions does not matter."
        )
    if not numbers:
        return
    if connection.vendor == "postgresql":
        with connection.cursor() as cursor:
            cursor.execute(_LOCK_POSTGRESQL, [numbers])
    else:
        for number in numbers:
            _lock_row(connection, number)


def _number(topic: str, key: str) -> int:
    digest = hashlib.blake2b(f"{topic}\x00{key}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, signed=True)


def _lock_row(connection: BaseDatabaseWrapper, number: int) -> None:
    """Unlike SELECT FOR UPDATE, an UPDATE locks its row on every database, and the whole database on SQLite."""
    with connection.cursor() as cursor:
        cursor.execute(_LOCK_ROW, [number])
        if cursor.rowcount:
            return
        try:
            with transaction.atomic(using=connection.alias):
                cursor.execute(_ADD_ROW, [number])
        except IntegrityError:
            # Another transaction has added and committed it meanwhile.
            cursor.execute(_LOCK_ROW, [number])
