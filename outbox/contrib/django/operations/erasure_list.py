"""The list of erasures: a file outside of the databases, to which `outbox_erase` appends and which nothing shortens.

A backup that is older than an erasure still has the erased data. After a restore of such a backup, a worker reads the
list and repeats the erasures. The list has ids, keyed hashes and reasons, and no personal data.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Any, Final, Protocol, cast

from outbox.broker.operations.erasing import Erasure
from outbox.contrib.django.settings.conf import get_settings, imported
from outbox.errors import ConfigurationError, OutboxError

_NAMES: Final = ("kind", "topic", "value", "replacement", "reason", "at")


class ErasureStore(Protocol):
    """Stores the lines of the list. OUTBOX['ERASURE_LIST'] may name a class with these methods by its dotted path."""

    def read(self) -> str | None:
        """Return all lines; None if the list does not exist."""

    def append(self, lines: str) -> None:
        """Add lines at the end, and return when they are durable. Creates the list if it does not exist."""


class ErasureFile:
    """The list as a file, which only the user of the process may read and write."""

    def __init__(self, path: str) -> None:
        self._path = Path(path)

    def read(self) -> str | None:
        """Return all lines; None if the file does not exist."""
        try:
            return self._path.read_text(encoding="utf-8")
        except FileNotFoundError:
            return None

    def append(self, lines: str) -> None:
        """Add lines at the end, and wait until the disk has them."""
        descriptor = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        try:
            # One write, so that the lines of two commands are not mixed.
            os.write(descriptor, lines.encode())
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def store_of_settings() -> ErasureStore | None:
    """Return the store that OUTBOX['ERASURE_LIST'] names; None without this setting. Raises ConfigurationError."""
    place = get_settings().erasure_list
    if place is None:
        return None
    if get_settings().erasure_secret is None:
        raise ConfigurationError(
            "OUTBOX['ERASURE_LIST'] is set, but OUTBOX['ERASURE_SECRET'] is not: the list has a keyed hash of each "
            "erased key. Set ERASURE_SECRET to a random text, and keep it for as long as you keep backups."
        )
    if "/" in place:
        return ErasureFile(place)
    return cast(ErasureStore, imported("OUTBOX['ERASURE_LIST']", place)())


def append(store: ErasureStore, erasures: Sequence[Erasure]) -> None:
    """Add the erasures to the list. Raises OutboxError if the list cannot be written."""
    lines = [json.dumps({**asdict(one), "at": one.at.isoformat()}) for one in erasures]
    try:
        store.append("".join(f"{line}\n" for line in lines))
    except OSError as error:
        raise OutboxError(
            f"the list of erasures (OUTBOX['ERASURE_LIST']) cannot be written: {error}. Nothing was erased. Correct "
            "the path or its permissions, and repeat the command."
        ) from error


def read(store: ErasureStore) -> list[Erasure] | None:
    """Return the erasures of the list; None if the list does not exist. Raises OutboxError if it cannot be read."""
    try:
        lines = store.read()
    except OSError as error:
        raise OutboxError(f"the list of erasures (OUTBOX['ERASURE_LIST']) cannot be read: {error}.") from error
    if lines is None:
        return None
    return [_erasure(number, line) for number, line in enumerate(lines.splitlines(), start=1) if line.strip()]


def _erasure(number: int, line: str) -> Erasure:
    try:
        given: dict[str, Any] = json.loads(line)
        values = {name: given[name] for name in _NAMES}
        return Erasure(**{**values, "at": datetime.fromisoformat(values["at"])})
    except (ValueError, KeyError, TypeError) as error:
        raise OutboxError(
            f"line {number} of the list of erasures (OUTBOX['ERASURE_LIST']) is damaged: {error!r}. Restore the line "
            "from a copy of the list. Until then, erasures after a restore would be incomplete."
        ) from error
