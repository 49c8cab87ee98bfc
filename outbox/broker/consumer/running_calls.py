"""Note the running handler calls of this process in a file, which the parent process reads if this process dies.

The parent makes the file and passes its descriptor to the child. The child maps the file into memory. So a note costs
one copy in memory, and the notes survive any death of the child. The file has no name, so it disappears when both
processes have ended. A process whose parent has made no such file writes no notes. If a message kills a process that
writes no notes, no other process can find out which message killed it.

See decision 065.
"""

from __future__ import annotations

import errno
import mmap
import os
import struct
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final
from uuid import UUID

from outbox.broker.groups.quarantine import RunningCall

VARIABLE: Final = "OUTBOX_RUNNING_CALLS_FD"
_MAGIC: Final = b"outbox-1"

# The header: magic bytes, number of slots, bytes per slot, why the process ends (0: it does not), instance.
_HEADER: Final = struct.Struct("=8sIII16s")
_ENDS_AT: Final = 16
_TOLD_TO_STOP: Final = 1
_HUNG: Final = 2
# A slot begins with the number of messages (0: free), whether these messages are tried alone, and the group id. The log
# ids of the messages are the remaining content of the slot.
_CALL: Final = struct.Struct("=IIi4x")
_LOG_ID_BYTES: Final = 8


class RunningCalls:
    """The file as the child process writes it.

    Handler threads add and remove the notes. If no slot is free, a call is not noted.
    """

    def __init__(self, descriptor: int, instance: UUID, *, calls: int, batch: int) -> None:
        """Make slots for `calls` running calls of up to `batch` messages. Raises OSError if the disk is full."""
        self._slot_bytes = _CALL.size + batch * _LOG_ID_BYTES
        size = _HEADER.size + calls * self._slot_bytes
        # Write zeros instead of only setting the size of the file. On a nearly full disk, this write stores only a
        # part. Without this write, a later access to a mapped page on a full disk would kill this process.
        if os.pwrite(descriptor, bytes(size), 0) < size:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._map = mmap.mmap(descriptor, size)
        self._slots = calls
        self._free = deque(range(calls))
        _HEADER.pack_into(self._map, 0, _MAGIC, calls, self._slot_bytes, 0, instance.bytes)

    def go_on_as(self, instance: UUID) -> None:
        """Continue under another instance id after a new registration.

        Call this only while no handler call is running.
        """
        _HEADER.pack_into(self._map, 0, _MAGIC, self._slots, self._slot_bytes, 0, instance.bytes)

    def note(self, group_id: int, log_ids: Sequence[int], *, alone: bool) -> int | None:
        """Note that a handler call begins for these messages. Return the slot for `forget`; None if no slot is free."""
        try:
            slot = self._free.popleft()
        except IndexError:
            return None
        start = _HEADER.size + slot * self._slot_bytes
        struct.pack_into(f"={len(log_ids)}q", self._map, start + _CALL.size, *log_ids)
        # Write the number of messages last, because a number above 0 marks the slot as used.
        _CALL.pack_into(self._map, start, len(log_ids), alone, group_id)
        return slot

    def forget(self, slot: int) -> None:
        """Remove the note of a call that has returned."""
        _CALL.pack_into(self._map, _HEADER.size + slot * self._slot_bytes, 0, False, 0)
        self._free.append(slot)

    def told_to_stop(self) -> None:
        """Note that this process was asked to stop.

        The parent then does not blame the running calls for the end of this process.
        """
        struct.pack_into("=I", self._map, _ENDS_AT, _TOLD_TO_STOP)

    def hung(self) -> None:
        """Note that this process ends itself, because handlers hang."""
        struct.pack_into("=I", self._map, _ENDS_AT, _HUNG)


def inherited(instance: UUID, *, calls: int, batch: int) -> RunningCalls | None:
    """Return the file that the parent of this process made; None if there is none. Raises OSError."""
    # Remove the variable, so that processes started by this process do not use the file.
    descriptor = os.environ.pop(VARIABLE, "")
    if not descriptor.isdecimal():
        return None
    try:
        return RunningCalls(int(descriptor), instance, calls=calls, batch=batch)
    finally:
        os.close(int(descriptor))


@dataclass(frozen=True, slots=True)
class LastCalls:
    """The notes of a process, read after its death."""

    instance: UUID
    told_to_stop: bool
    calls: Sequence[RunningCall]
    hung: bool = False


def read(descriptor: int) -> LastCalls | None:
    """Return the notes of a dead child; None if the child never began to consume.

    Raises ValueError if the notes are unreadable.
    """
    content = os.pread(descriptor, os.fstat(descriptor).st_size, 0)
    if not content.strip(b"\0"):
        return None
    try:
        magic, slots, slot_bytes, ends, instance = _HEADER.unpack_from(content)
        if magic != _MAGIC or slot_bytes < _CALL.size:
            raise ValueError("the file does not begin as a file of running calls")
        starts = range(_HEADER.size, _HEADER.size + slots * slot_bytes, slot_bytes)
        calls = [call for start in starts if (call := _read_call(content, start, slot_bytes)) is not None]
    except struct.error as error:
        raise ValueError(str(error)) from error
    return LastCalls(UUID(bytes=instance), ends == _TOLD_TO_STOP, calls, ends == _HUNG)


def _read_call(content: bytes, start: int, slot_bytes: int) -> RunningCall | None:
    count, alone, group_id = _CALL.unpack_from(content, start)
    if count * _LOG_ID_BYTES > slot_bytes - _CALL.size:
        raise ValueError(f"a call of {count} messages does not fit in its slot")
    if not count:
        return None
    log_ids = struct.unpack_from(f"={count}q", content, start + _CALL.size)
    return RunningCall(group_id, log_ids, bool(alone))
