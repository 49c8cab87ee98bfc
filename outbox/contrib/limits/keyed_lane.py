"""The lane of a subscription with the limit `per_key`: it serves the keys in turn, and each key within its slots.

The slots of the keys are in the broker's database (slots.py), because messages of one key may be in the queues of
several processes: a failed message is in the retry queue, and a producer may choose a queue. See decision 209.
"""

from __future__ import annotations

import heapq
import time
from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence, Set
from itertools import chain
from typing import Final

from outbox.broker.consumer.lanes import FetchedEntry, NamedQueue, RoundRobinLane
from outbox.contrib.limits.declaration import Limits

# If another instance holds all slots of a key, this instance asks again after this time (seconds).
_AGAIN_SECONDS: Final = 0.25
# If other instances wait for a key, this instance releases the key for this time (seconds).
_YIELD_SECONDS: Final = 0.5
# A process keeps the slots of a key without messages for up to this time (seconds), because the next message of the key
# may arrive soon. It keeps the slots of at most this number of such keys, because it renews each slot.
_KEEP_SECONDS: Final = 2.0
_MOST_KEPT: Final = 1_000
# If this number of keys has slots and waits for a thread, a key that is served releases its slot before its next
# message.
_MOST_READY: Final = 256

_NO_SLOTS: Final[frozenset[int]] = frozenset()


class _Key(NamedQueue):
    """The messages of one key. `running`: calls that have not ended. `slots`: the numbers of the slots held here.

    `usable`: how many of these numbers the present limit allows.
    `yields`: the key starts no call with its present slots, so that another key or another instance has a turn.
    """

    __slots__ = ("is_asking", "is_denied", "running", "slots", "usable", "yields")

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.running = 0
        self.slots: set[int] = set()
        self.usable = 0
        self.is_asking = False
        self.is_denied = False
        self.yields = False

    @property
    def may_start(self) -> bool:
        """Whether a call may start. Messages without a key have no limit."""
        return not self.name or (self.running < self.usable and not self.yields)


class KeyedLane(RoundRobinLane[_Key]):
    """A lane whose names are the keys: at most `per_key` calls of one key run at once."""

    def __init__(self, limits: Limits) -> None:
        assert limits.per_key is not None
        super().__init__(_Key)
        self.per_key = limits.per_key
        # The keys for which other instances wait.
        self._contested: Collection[str] = frozenset()
        # `_asking`: the keys that need a slot. `_denied`: the keys whose slots are taken, by the time at which to ask
        # again.
        self._asking: dict[_Key, None] = {}
        self._denied: list[tuple[float, int, _Key]] = []
        # `_spare`: the keys that may have slots which they do not need, by the time since which; the oldest first.
        # `_urgent`: those that another key or instance waits for.
        self._spare: dict[_Key, float] = {}
        self._urgent: dict[_Key, None] = {}

    # -- Lane -----------------------------------------------------------------------------------

    def take(self, now: float) -> list[FetchedEntry]:
        """Return the message of the next call; an empty list if no message may be handled now."""
        if self.later or self._denied:
            self.wake(now)
        while self.ready:
            key = self.ready.popleft()
            key.is_ready = False
            if key.items and key.may_start:
                key.running += 1
                self.waiting -= 1
                item = key.items.popleft()
                self.schedule(key)
                return [item]
            self.schedule(key)
            self._note_spare(key, now)
        return []

    def end(self, items: Sequence[FetchedEntry], again: Sequence[FetchedEntry]) -> None:
        """End the call whose items `take` has returned.

        A later `take` returns the items in `again` when they are due.
        """
        super().end(items, again)
        now = time.monotonic()
        for item in items:
            key = self.named(item.key)
            key.running -= 1
            if key.name in self._contested:
                if key.items and not key.is_denied:
                    key.yields = True
                    self._deny(key, now + _YIELD_SECONDS)
                self._urgent[key] = None
            elif len(self.ready) >= _MOST_READY and self._asking and key.items and not key.is_ready:
                key.yields = True
                self._ask(key)
                self._urgent[key] = None
            else:
                self._note_spare(key, now)
            self.schedule(key)

    def next_at(self) -> float | None:
        """Return the time at which a failed message is due or a denied key asks again; None if there is no such time.

        A key without messages may still be in the list of denied keys; its time has no effect.
        """
        times = [entries[0][0] for entries in (self.later, self._denied) if entries]
        return min(times, default=None)

    def wake(self, now: float) -> None:
        """Count the failed messages that are due now as waiting, and let the denied keys ask again whose time has
        come."""
        super().wake(now)
        while self._denied and self._denied[0][0] <= now:
            key = heapq.heappop(self._denied)[2]
            key.is_denied = key.yields = False
            self.schedule(key)
            self._note_spare(key, now)

    def startable(self, most: int) -> int:
        """Return how many messages could start if the asking keys got their slots, at most `most`."""
        count = 0
        for key in chain(self.ready, self._asking):
            if count >= most:
                break
            free = self.per_key - key.running if key.name else most
            count += max(0, min(len(key.items), free))
        return min(count, most)

    # -- slots ----------------------------------------------------------------------------------

    def asks(self, most: int) -> dict[str, int]:
        """Return the keys that need slots, at most `most` keys, with the number of slots. The caller then calls
        `grant`."""
        asked: dict[str, int] = {}
        while self._asking and len(asked) < most:
            key = next(iter(self._asking))
            del self._asking[key]
            key.is_asking = key.yields = False
            count = min(len(key.items), self.per_key - key.usable)
            if key.items and count > 0 and not key.may_start:
                asked[key.name] = count
            else:
                self.schedule(key)
                self._note_spare(key, time.monotonic())
        return asked

    @property
    def room(self) -> int:
        """How many keys may ask now without holding slots that they cannot use soon."""
        return _MOST_READY - len(self.ready)

    def grant(self, asked: Iterable[str], taken: Mapping[str, set[int]], now: float) -> None:
        """Store the slots that were taken for the keys of `asks`. A key that got none asks again later."""
        for name in asked:
            key = self.named(name)
            numbers = taken.get(name)
            if numbers:
                self._set_slots(key, key.slots | numbers)
                self.schedule(key)
            else:
                self._deny(key, now + _AGAIN_SECONDS)

    def hold(self, numbers: Mapping[str, set[int]]) -> None:
        """Replace the slots of all keys by those that the database shows for this instance."""
        now = time.monotonic()
        for name in numbers:
            self.named(name)
        changed = [key for name, key in self._names.items() if key.slots != numbers.get(name, _NO_SLOTS)]
        for key in changed:
            self._set_slots(key, numbers.get(key.name, _NO_SLOTS))
            self._note_spare(key, now)
        self._schedule_again(changed)

    def limit(self, per_key: int) -> None:
        """Change the limit. A key keeps its slots above a lower limit until its running calls have ended."""
        if per_key != self.per_key:
            self.per_key = per_key
            now = time.monotonic()
            for key in self._names.values():
                self._set_slots(key, key.slots)
                self._note_spare(key, now)
            self._schedule_again(self._names.values())

    def contest(self, names: Collection[str]) -> None:
        """Store the keys for which other instances wait."""
        self._contested = names
        for name in names:
            key = self._names.get(name)
            if key is not None and len(key.slots) > self._need(key):
                self._urgent[key] = None

    @property
    def must_release(self) -> bool:
        """Whether `spare` has slots that should be released now."""
        return bool(self._urgent)

    def spare(self, now: float) -> list[tuple[str, int]]:
        """Remove and return the slots that no running call and no message needs, without those that this lane keeps."""
        found: list[tuple[str, int]] = []
        for key in self._urgent:
            self._spare.pop(key, None)
            found += self._surplus(key)
        self._urgent.clear()
        while self._spare:
            key, since = next(iter(self._spare.items()))
            if since > now - _KEEP_SECONDS and len(self._spare) <= _MOST_KEPT:
                break
            del self._spare[key]
            found += self._surplus(key)
        return found

    def give_up(self) -> list[tuple[str, int]]:
        """Remove and return the slots of all keys, because no call runs and none starts soon."""
        found = [(key.name, number) for key in self._names.values() for number in key.slots]
        self.hold({})
        return found

    def _need(self, key: _Key) -> int:
        """Return how many slots a key needs now. Slots above the limit serve only the calls that are running."""
        if key.yields or not key.usable:
            return key.running
        return max(key.running, min(key.running + len(key.items), self.per_key))

    def _note_spare(self, key: _Key, now: float) -> None:
        """Note the time if a key has slots that it does not need, or if the lane need not know the key any more."""
        if not (key.items or key.running) or len(key.slots) > self._need(key):
            self._spare.pop(key, None)
            self._spare[key] = now

    def _surplus(self, key: _Key) -> list[tuple[str, int]]:
        """Remove and return the slots that a key does not need, highest numbers first."""
        released = sorted(key.slots, reverse=True)[: max(0, len(key.slots) - self._need(key))]
        self._set_slots(key, key.slots.difference(released))
        is_used = key.items or key.running or key.slots or key.is_ready or key.is_asking or key.is_denied
        if not is_used and self._names.get(key.name) is key:
            del self._names[key.name]
        return [(key.name, number) for number in released]

    def _set_slots(self, key: _Key, numbers: Set[int]) -> None:
        key.slots = set(numbers)
        key.usable = sum(number <= self.per_key for number in numbers) if numbers else 0

    @property
    def denied(self) -> list[str]:
        """The keys with messages whose slots other instances hold."""
        return [key.name for _, _, key in self._denied if key.items]

    @property
    def is_blocked(self) -> bool:
        """Whether messages wait for slots of their keys."""
        return self.waiting > 0 and not self.ready

    # -- turns ----------------------------------------------------------------------------------

    def _schedule_again(self, keys: Collection[_Key]) -> None:
        """Schedule these keys, whose slots or limit have changed."""
        if keys:
            ready, self.ready = self.ready, deque()
            for key in ready:
                # A key that has lost its slots asks for slots now, and not after its turn.
                key.is_ready = False
                self.schedule(key)
            for key in keys:
                self.schedule(key)

    def schedule(self, named: _Key) -> None:
        """Put a key with messages where it waits: for its turn, or for a slot."""
        if not named.items or named.is_ready:
            return
        if named.may_start:
            named.is_ready = True
            self.ready.append(named)
        elif named.usable < self.per_key and not named.is_denied:
            self._ask(named)

    def shortened(self, named: _Key) -> None:
        """Note that messages of a key have left the lane: it may have more slots than it needs."""
        self._note_spare(named, time.monotonic())

    def _ask(self, key: _Key) -> None:
        key.is_asking = True
        self._asking[key] = None

    def _deny(self, key: _Key, until: float) -> None:
        key.is_denied = True
        heapq.heappush(self._denied, (until, next(self._numbers), key))
