"""Time-ordered identifiers (UUID version 7, RFC 9562)."""

from __future__ import annotations

import os
import struct
import threading
import time
from uuid import UUID

# Each call of os.urandom is a system call, so one call brings the random bytes of this number of ids.
_IDS_PER_READ = 64

_lock = threading.Lock()
_last = 0
# Random numbers of 8 bytes that no id has used. A forked process must not use the numbers of its parent.
_random: list[int] = []


def _reset_after_fork() -> None:
    global _lock
    _lock = threading.Lock()
    _random.clear()


os.register_at_fork(after_in_child=_reset_after_fork)


def uuid7() -> UUID:
    """Return a new UUIDv7. Within this process every id is greater than the id before.

    The id has 48 bits of Unix milliseconds, 12 bits of sub-millisecond fraction (RFC 9562, method 3) and 62 random
    bits. Because the ids increase, new entries go to the end of the unique index on message ids.
    """
    global _last
    with _lock:
        nanoseconds = time.time_ns()
        stamp = (nanoseconds << 12) // 1_000_000
        _last = stamp = max(stamp, _last + 1)
        if not _random:
            _random.extend(struct.unpack(f"{_IDS_PER_READ}Q", os.urandom(8 * _IDS_PER_READ)))
        random = _random.pop()
    high = (stamp >> 12) << 16 | 0x7000 | (stamp & 0xFFF)
    low = 0x8000_0000_0000_0000 | random >> 2
    return UUID(int=high << 64 | low)
