"""The list of erasures: a file outside of the databases, to which `outbox_erase` appends and which nothing shortens.

A backup that is older than an erasure still has the erased data. After a restore of such a backup, a worker reads the
list and repeats the erasures. The list has ids, keyed hashes and reasons, and no personal data.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Sequence
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Any, Final, Protocol, cast

from outbox.contrib.django.settings.conf import imported, settings_of
from outbox.contrib.erasure.broker_rows import Erasure
from outbox.contrib.erasure.settings import ErasureSettings
from outbox.errors import ConfigurationError, OutboxError, ServiceUnavailable

_NAMES: Final = ("kind", "topic", "value", "replacement", "reason", "at")


class ErasureStore(Protocol):
    """Stores the lines of the list. OUTBOX['ERASURE_LIST'] may name a class with these methods by its dotted path."""

    def read(self) -> str | None:
        """Return all lines; None if the list does not exist.

        After ConnectionError or TimeoutError, a starting process waits and tries again. After another error it ends.
        """

    def append(self, lines: str) -> None:
        """Add lines at the end, and return when they are durable. Creates the list if it does not exist."""


class ErasureFile:
    """The list as a file, which only the user of the process may read and write.

    A crash or a full disk can leave a part of a line at the end. Its erasure has not begun, because `append` had not
    returned. So `read` leaves this part out, and the next `append` removes it.
    """

    def __init__(self, path: str) -> None:
        self._path = Path(path)

    def read(self) -> str | None:
        """Return all complete lines; None if the file does not exist."""
        try:
            return _complete_lines(self._path.read_bytes()).decode()
        except FileNotFoundError:
            return None

    def append(self, lines: str) -> None:
        """Add lines at the end, and wait until the disk has them. Raises OSError; the list is then as before."""
        is_new = not self._path.exists()
        with os.fdopen(os.open(self._path, os.O_RDWR | os.O_CREAT, 0o600), "r+b", buffering=0) as file:
            # The lock keeps the lines of two commands apart.
            fcntl.flock(file, fcntl.LOCK_EX)
            known = _complete_lines(file.read())
            end = len(known)
            try:
                file.truncate(end)
                file.seek(end)
                rest = (b"\n" if known and not known.endswith(b"\n") else b"") + lines.encode()
                while rest:
                    rest = rest[file.write(rest) :]
                os.fsync(file.fileno())
            except OSError:
                file.truncate(end)
                raise
        if is_new:
            _sync_folder(self._path.parent)


def _complete_lines(data: bytes) -> bytes:
    """Return the data without a part of a line at its end. A last line that an editor left without its end is whole."""
    end = data.rfind(b"\n") + 1
    try:
        json.loads(data[end:])
    except ValueError:
        return data[:end]
    return data


def _sync_folder(folder: Path) -> None:
    """Wait until the disk has the names of the files in a folder."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def store_of_settings() -> ErasureStore | None:
    """Return the store that OUTBOX['ERASURE_LIST'] names; None without this setting. Raises ConfigurationError."""
    settings = settings_of(ErasureSettings)
    place = settings.erasure_list
    if place is None:
        return None
    if settings.erasure_secret is None:
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
    """Return the erasures of the list; None if the list does not exist.

    Raises ServiceUnavailable if the store of the list does not answer, or OutboxError if the list cannot be read.
    """
    try:
        lines = store.read()
    except (ConnectionError, TimeoutError) as error:
        raise ServiceUnavailable(
            f"the store of the list of erasures (OUTBOX['ERASURE_LIST']) does not answer: {error}."
        ) from error
    except (OSError, UnicodeDecodeError) as error:
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
