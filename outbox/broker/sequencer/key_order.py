"""Order per key on FIFO topics: find decided messages that must wait for an earlier message of their key.

`KeyOrder` is only in memory and uses no database, so that tests can check its rules alone. A decided message is held
(it waits) while an earlier row of its topic and key is open. An open row is an undecided half message that the snapshot
of the tick shows. A row is not open any more if an operator or the settings of the topic have released it.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from uuid import UUID

# Topic and key.
Key = tuple[int, str]


@dataclass
class KeyOrder:
    """All open rows and held messages of a broker. Of two rows, the row with the smaller log id is the earlier one."""

    _open: dict[int, tuple[Key, UUID]] = field(default_factory=dict)
    _open_by_key: dict[Key, list[int]] = field(default_factory=dict)
    _held_by_key: dict[Key, list[int]] = field(default_factory=dict)
    # `_waiting_since` has the time at which each key began to wait, on the clock of the sequencer. `_hinted` has the
    # transactions whose check was requested already.
    _waiting_since: dict[Key, float] = field(default_factory=dict)
    _hinted: set[UUID] = field(default_factory=set)
    # `_reblocked` (for `new_blockers`) and `_to_hint` (for `hints`) have only those waiting keys whose first open row
    # may have changed, so keys without a change cost no time. `_to_hint` is a heap that begins with the key that has
    # waited longest.
    _reblocked: set[Key] = field(default_factory=set)
    _to_hint: list[tuple[float, Key]] = field(default_factory=list)
    # The keys with held messages that may no longer have to wait. The next `release` checks these keys.
    _releasable: set[Key] = field(default_factory=set)

    @property
    def is_idle(self) -> bool:
        """Whether no row is open and no message is held."""
        return not self._open and not self._held_by_key

    @property
    def has_held(self) -> bool:
        """Whether any decided message is held."""
        return bool(self._held_by_key)

    @property
    def has_new_blockers(self) -> bool:
        """Whether keys wait for a transaction that `new_blockers` has not returned yet."""
        while self._reblocked:
            key = self._reblocked.pop()
            if key in self._held_by_key and self._first_open(key) is not None:
                self._reblocked.add(key)
                return True
        return False

    def open(self, log_id: int, key: Key, transaction_id: UUID) -> None:
        """Add a half message that became visible to the snapshot of the tick."""
        if log_id not in self._open:
            self._open[log_id] = (key, transaction_id)
            heapq.heappush(self._open_by_key.setdefault(key, []), log_id)
            self._note_blocker(key)

    def close(self, log_ids: Iterable[int]) -> None:
        """Remove rows that no longer block a message, because they are decided or released."""
        for log_id in log_ids:
            opened = self._open.pop(log_id, None)
            if opened is not None:
                self._releasable.add(opened[0])
                self._note_blocker(opened[0])

    def hold(self, log_id: int, key: Key, now: float) -> None:
        """Add a decided message that must wait."""
        heapq.heappush(self._held_by_key.setdefault(key, []), log_id)
        if key not in self._waiting_since:
            self._waiting_since[key] = now
            self._note_blocker(key)

    def reconsider(self) -> None:
        """Make the next `release` check all held messages, because this process has just taken over."""
        self._releasable.update(self._held_by_key)

    def must_wait(self, log_id: int, key: Key) -> bool:
        """Return whether an earlier message of the same key is open or held."""
        held = self._held_by_key.get(key)
        if held and held[0] < log_id:
            return True
        first = self._first_open(key)
        return first is not None and first < log_id

    def is_apart(self, log_id: int, key: Key) -> bool:
        """Return whether the message is not an open row, and no earlier message of its key is open or held."""
        return log_id not in self._open and not self.must_wait(log_id, key)

    def release(self, limit: int) -> list[int]:
        """Take up to `limit` held messages that are no longer blocked."""
        released: list[int] = []
        for key in list(self._releasable):
            held = self._held_by_key.get(key, [])
            first = self._first_open(key)
            while held and len(released) < limit and (first is None or held[0] < first):
                released.append(heapq.heappop(held))
            if not held:
                self._held_by_key.pop(key, None)
                self._waiting_since.pop(key, None)
            if len(released) >= limit:
                return released
            self._releasable.discard(key)
        return released

    @property
    def has_releasable(self) -> bool:
        """Whether the limit of `release` has left keys unchecked."""
        return bool(self._releasable)

    def new_blockers(self) -> list[UUID]:
        """Return the transactions that now block keys with held messages.

        The list has only the blockers of keys whose blocker may have changed since the last call.
        """
        keys, self._reblocked = self._reblocked, set()
        found = (self._first_open(key) for key in keys if key in self._held_by_key)
        return list({self._open[log_id][1] for log_id in found if log_id is not None})

    def hints(self, now: float, after_seconds: float) -> Sequence[UUID]:
        """Return the undecided transactions that block a key which has waited for at least `after_seconds`.

        The method returns each transaction only once.
        """
        overdue = []
        while self._to_hint and now - self._to_hint[0][0] >= after_seconds:
            _, key = heapq.heappop(self._to_hint)
            first = self._first_open(key) if key in self._waiting_since else None
            if first is not None:
                transaction_id = self._open[first][1]
                if transaction_id not in self._hinted:
                    self._hinted.add(transaction_id)
                    overdue.append(transaction_id)
        return overdue

    def _note_blocker(self, key: Key) -> None:
        since = self._waiting_since.get(key)
        if since is not None:
            self._reblocked.add(key)
            heapq.heappush(self._to_hint, (since, key))

    def _first_open(self, key: Key) -> int | None:
        heap = self._open_by_key.get(key)
        while heap:
            if heap[0] in self._open:
                return heap[0]
            heapq.heappop(heap)
        self._open_by_key.pop(key, None)
        return None
