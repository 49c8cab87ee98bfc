"""The lock per FIFO key: taken in the local transaction before the log position is drawn, held to its end."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Final

from django.db import transaction
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.utils import IntegrityError

_LOCK_POSTGRESQL: Final = "SELECT pg_advisory_xact_lock(%s)"
_LOCK_ROW: Final = "UPDATE outbox_key_lock SET taken = taken + 1 WHERE key_hash = %s"
_ADD_ROW: Final = "INSERT INTO outbox_key_lock (key_hash, taken) VALUES (%s, 0)"


def lock_keys(connection: BaseDatabaseWrapper, keys: Iterable[tuple[str, str]]) -> None:
    """Wait for, and hold until the transaction ends, the locks of these (topic, key) pairs.

    Sorted, so that two publish calls with the same keys do not wait for each other crosswise.
    """
    for number in sorted({_number(topic, key) for topic, key in keys}):
        if connection.vendor == "postgresql":
            with connection.cursor() as cursor:
                cursor.execute(_LOCK_POSTGRESQL, [number])
        else:
            _lock_row(connection, number)


def _number(topic: str, key: str) -> int:
    digest = hashlib.blake2b(f"{topic}\x00{key}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, signed=True)


def _lock_row(connection: BaseDatabaseWrapper, number: int) -> None:
    """An UPDATE locks its row everywhere, and the whole database on SQLite; unlike SELECT FOR UPDATE."""
    with connection.cursor() as cursor:
        cursor.execute(_LOCK_ROW, [number])
        if cursor.rowcount:
            return
        try:
            with transaction.atomic(using=connection.alias):
                cursor.execute(_ADD_ROW, [number])
        except IntegrityError:
            # Somebody else added it and has committed by now.
            cursor.execute(_LOCK_ROW, [number])
