"""Keeps the calls of one subscription in this process within the limits that hold for all workers together.

The dispatching thread calls `prepare` before it takes messages from the lanes. `prepare` renews, takes and releases
slots and tokens (slots.py) for many messages at once, and never waits. A message that waits for a limit stays in
its lane: it uses no attempt and no thread, and the messages of other subscriptions continue.

See decision 209.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Final
from uuid import UUID

from outbox.broker.consumer.lanes import FetchedEntry, Lane
from outbox.broker.consumer.owned_queue import AdmissionLease, Subscribed
from outbox.broker.consumer.subscription_runner import SubscriptionCalls
from outbox.broker.database.executor import Executor
from outbox.contrib.limits import slots
from outbox.contrib.limits.declaration import Limits
from outbox.contrib.limits.keyed_lane import KeyedLane
from outbox.contrib.limits.slots import ALL_KEYS, LEAD_SECONDS, Demand, SlotsHeld

# An instance renews its demand and looks at the demand of the other instances at this interval (seconds), or three
# times per lease term if that is shorter. It renews its slots three times per lease term, because there may be one for
# each key.
_RENEW_SECONDS: Final = 1.0
# An instance stores the limits of its code again after this time (seconds), if a process with other code has changed
# them.
_DECLARE_SECONDS: Final = 60.0
# An instance that gets fewer slots than its share asks again after this time (seconds).
_AGAIN_SECONDS: Final = 0.1
# With a higher rate than this number of messages per second, an instance takes tokens for messages to come, too: as
# many as it has used in LEAD_SECONDS lately. Further tokens would lapse, although other instances may need them. To
# find out how many it uses, it looks at a span of at least `_MEASURED_SECONDS`.
_TAKES_AHEAD: Final = 100.0
_MOST_AHEAD: Final = 1000
_MEASURED_SECONDS: Final = 0.02
# An instance releases the slots of keys without messages at this interval (seconds), apart from those that the lane
# keeps.
_RELEASE_SECONDS: Final = 0.5
# Tokens that were due this long ago (seconds) and are still unused lapse, because they would raise the burst.
_TOKEN_SECONDS: Final = 1.0


class Limiter:
    """The admission of limits: the slots and tokens of one subscription in this process.

    Only the dispatching thread uses a `Limiter`.
    """

    def __init__(
        self, declared: Limits, subscribed: Subscribed, calls: SubscriptionCalls, lanes: Sequence[Lane]
    ) -> None:
        assert subscribed.admission_lease is not None
        self._key: Final = subscribed.key
        self._threads: Final = subscribed.subscription.threads
        # For a claimed message, the handler may be called even after the time limit, because the claim decides.
        self._claims: Final = subscribed.claims
        self._lease: Final[AdmissionLease] = subscribed.admission_lease
        self._declared: Final = declared
        self._calls: Final = calls
        self._lanes: Final = lanes
        self._keyed: Final = next((lane for lane in lanes if isinstance(lane, KeyedLane)), None)
        self.limits = declared
        # `_numbers`: the numbers of the slots of the limit `running`. `_share`: how many of them this process may use.
        self._numbers: set[int] = set()
        self._share = 0
        # When to renew the demand, when to renew the slots, and when to declare the limits again.
        self._renew_at = 0.0
        self._slots_at = 0.0
        self._declare_at = 0.0
        # The greatest number of threads that had work since the last renewal.
        self._peak = 0
        # Whether the database has rows of this process for the subscription.
        self._is_known = False
        # The times (time.monotonic) of the tokens, and how many tokens have been used before they were taken. `_spent`
        # counts the tokens that were used since `_took_at`.
        self._tokens: deque[float] = deque()
        self._debt = 0
        self._spent = 0
        self._took_at = 0.0
        self._waiting_for = ""
        self._waiting_since = 0.0
        self._release_at = 0.0
        # Whether the dispatching thread starts messages of this subscription now, and whether it could rely on the
        # slots at the end of the last `prepare`.
        self._may_start = False
        self._is_trusted = False
        calls.allow(0)

    # -- the dispatching thread -----------------------------------------------------------------

    def prepare(self, run: Executor, instance: UUID, now: float, *, term_seconds: float, may_start: bool) -> None:
        """Renew, take and release slots and tokens, as far as it is due. `may_start`: whether the dispatching thread
        starts messages of this subscription now."""
        for lane in self._lanes:
            lane.wake(now)
        self._may_start = may_start
        # A message that waits for its key wants one thread: if the process wanted none, it would withdraw its demand.
        startable = max(self._startable, min(1, self.waiting)) if may_start else 0
        self._peak = max(self._peak, min(self._threads, self._calls.in_hand + startable))
        if self._peak and not self._is_known:
            self._renew_at = now
        if self._is_known or self._peak:
            if now >= self._renew_at:
                self._renew(run, instance, now, term_seconds)
            self._keep_share(run, instance)
        if may_start and self._is_known and self._lease.trusted():
            self._take_tokens(run, now)
            self._exchange_keys(run, instance, now, term_seconds)
        self._is_trusted = self._is_known and self._lease.trusted()

    def admits(self, now: float) -> bool:
        """Return whether a message may be taken from the lanes now, in the step of the last `prepare`.

        The handler's thread looks at the slots again.
        """
        return self._is_trusted and (self.limits.rate is None or bool(self._tokens and self._tokens[0] <= now))

    def spend(self, items: Sequence[FetchedEntry], now: float) -> None:
        """Use a token for each of these messages, which a call has taken from a lane.

        A message past its time limit uses no token, because its handler is not called. Otherwise, behind a backlog of
        such messages, each message would wait until its time limit is over, and no handler would ever be called.
        """
        if self.limits.rate is None:
            return
        for item in items:
            if item.ends_at is not None and item.ends_at <= now and not self._claims:
                continue
            self._spent += 1
            if self._tokens:
                self._tokens.popleft()
            else:
                self._debt += 1

    def next_at(self, now: float) -> float | None:
        """Return the next time at which `prepare` or `admits` may have another result; None if there is none."""
        times: list[float] = []
        if self._is_known:
            times.append(self._renew_at)
        if self._may_start and self.limits.rate is not None and self._calls.room > 0 and self._startable:
            times.append(self._tokens[0] if self._tokens else now)
        return min(times, default=None)

    def forget(self) -> None:
        """Forget all slots, because the server has begun a new life. Start no call before the next renewal."""
        self._lease.epoch += 1
        self._lease.trusted_until = 0.0
        self._is_trusted = False
        self._numbers.clear()
        self._calls.allow(0)
        if self._keyed is not None:
            self._keyed.hold({})
        self._is_known = False
        self._renew_at = self._slots_at = self._declare_at = 0.0
        self._tokens.clear()

    @property
    def waiting(self) -> int:
        """The number of messages in the lanes that may wait for a limit."""
        return sum(lane.waiting for lane in self._lanes)

    @property
    def _startable(self) -> int:
        """The number of calls that may start if they get slots and tokens, at most one per thread."""
        return sum(lane.startable(self._threads) for lane in self._lanes)

    # -- slots ----------------------------------------------------------------------------------

    def _renew(self, run: Executor, instance: UUID, now: float, term_seconds: float) -> None:
        # An abandoned call is no call of this process any more, but its handler still runs in its slot.
        if self._is_known and not (self._peak or self._calls.in_hand or self._calls.running):
            self._leave(run, instance)
            return
        if now >= self._declare_at:
            slots.declare_again(run, self._key, self._declared)
            self._declare_at = now + _DECLARE_SECONDS
        renews = now >= self._slots_at or not self._is_known
        held = slots.renew(run, self._key, instance, self._demand(now), term_seconds=term_seconds, slots=renews)
        self._is_known = True
        self._use(held.limits or self._declared)
        if held.numbers is not None:
            self._hold(held.numbers, held.trusted_until)
            self._slots_at = now + term_seconds / 3
        elif self.limits.running is not None and self._lease.trusted_until == math.inf:
            # An operator has added the limit `running`. Trust the first slots only until they expire.
            self._lease.trusted_until = held.trusted_until
        if self._keyed is not None:
            self._keyed.contest(held.contested)
        self._renew_at = now + min(_RENEW_SECONDS, term_seconds / 3)
        self._share = self._fair_share(held, instance)
        if self.limits.running is not None:
            missing = self._share - len(self._valid)
            if missing > 0:
                taken = slots.take(
                    run,
                    self._key,
                    instance,
                    {ALL_KEYS: missing},
                    limit=self.limits.running,
                    term_seconds=term_seconds,
                )
                self._numbers |= taken.get(ALL_KEYS, set())
            if len(self._valid) < min(self._peak, max(self._share, 1)):
                self._renew_at = now + _AGAIN_SECONDS
        self._peak = 0

    def _use(self, present: Limits) -> None:
        """Obey these limits from now on. The tokens of another rate are dropped: they may be due in an hour."""
        if present.per_second != self.limits.per_second:
            self._tokens.clear()
        self.limits = present
        if self._keyed is not None and present.per_key is not None:
            self._keyed.limit(present.per_key)

    def _hold(self, numbers: Mapping[str, set[int]], trusted_until: float) -> None:
        """Store the slots that the database shows for this instance."""
        self._numbers = set(numbers.get(ALL_KEYS, ()))
        if self._keyed is not None:
            self._keyed.hold({name: found for name, found in numbers.items() if name != ALL_KEYS})
        if not self._lease.trusted():
            # The slots were over before this renewal. So the calls that have not started may have lost theirs.
            self._lease.epoch += 1
        needs_slots = self.limits.running is not None or self._keyed is not None
        self._lease.trusted_until = trusted_until if needs_slots else math.inf

    def _fair_share(self, held: SlotsHeld, instance: UUID) -> int:
        running = self.limits.running
        if running is None:
            return 0
        wanted = held.wanted
        if (spare := running - sum(wanted.values())) >= 0:
            # Other instances need no more than they want now. Take further slots for the threads of this process.
            return min(self._threads, wanted[instance] + spare)
        return slots.fair_share(running, wanted, instance, held.rotation)

    @property
    def _valid(self) -> set[int]:
        """The numbers of this process's slots that the present limit allows: an operator may have lowered the limit."""
        running = self.limits.running
        return self._numbers if running is None else {number for number in self._numbers if number <= running}

    def _keep_share(self, run: Executor, instance: UUID) -> None:
        """Let as many calls run as this process has slots, and release the slots above its share."""
        if self.limits.running is None:
            self._calls.allow(None)
            return
        valid = self._valid
        allowed = min(self._share, len(valid))
        running = self._calls.allow(allowed)
        surplus = len(self._numbers) - max(allowed, running)
        if surplus > 0:
            released = sorted(self._numbers, reverse=True)[:surplus]
            slots.release(run, self._key, instance, [(ALL_KEYS, number) for number in released])
            self._numbers.difference_update(released)

    def _leave(self, run: Executor, instance: UUID) -> None:
        """Release all slots, because this process has had no message of the subscription since the last renewal."""
        self._calls.allow(0)
        self._share = 0
        held = [(ALL_KEYS, number) for number in self._numbers]
        if self._keyed is not None:
            held += self._keyed.give_up()
        if held:
            slots.release(run, self._key, instance, held)
        slots.withdraw_demand(run, self._key, instance)
        self._numbers.clear()
        self._waiting_for = ""
        self._is_known = False

    def _demand(self, now: float) -> Demand:
        waiting, reason = self.waiting, self._reason(now)
        if reason and not self._waiting_for:
            self._waiting_since = now
        self._waiting_for = reason
        return Demand(
            wanted=self._peak,
            in_use=self._calls.running,
            waiting=waiting + self._calls.waiting_for_admission,
            waiting_for=reason,
            waiting_seconds=now - self._waiting_since if reason else None,
            keys=self._keyed.denied if self._keyed is not None else (),
        )

    def _reason(self, now: float) -> str:
        """Return the name of the limit for which messages wait; '' if none waits for a limit."""
        if not self._is_known or not (self.waiting or self._calls.waiting_for_admission):
            return ""
        if self.limits.running is not None and self._calls.usable_threads < self._peak:
            return "running"
        if self.limits.rate is not None and self._calls.room > 0 and not self._has_token(now):
            return "rate"
        return "per_key" if self._keyed is not None and self._keyed.is_blocked else ""

    # -- tokens ---------------------------------------------------------------------------------

    def _has_token(self, now: float) -> bool:
        return self.limits.rate is None or bool(self._tokens and self._tokens[0] <= now)

    def _take_tokens(self, run: Executor, now: float) -> None:
        per_second = self.limits.per_second
        if per_second is None:
            return
        tokens = self._tokens
        while tokens and tokens[0] < now - _TOKEN_SECONDS:
            tokens.popleft()
        room = max(1, self._calls.room)
        startable = sum(lane.startable(room) for lane in self._lanes)
        missing = min(startable, room) - len(tokens)
        if self._debt or (missing > 0 and (not tokens or tokens[-1] < now + LEAD_SECONDS / 2)):
            wanted = max(0, missing)
            if wanted and per_second > _TAKES_AHEAD:
                used = self._spent * LEAD_SECONDS / max(now - self._took_at, _MEASURED_SECONDS)
                wanted = max(wanted, min(_MOST_AHEAD, int(used)))
            # The messages of the debt have started, so their tokens are taken even if they are due later.
            found = slots.take_tokens(
                run, self._key, wanted, per_second=per_second, burst=self.limits.burst, used=self._debt
            )
            self._debt = self._spent = 0
            self._took_at = now
            tokens.extend(found)

    # -- keys -----------------------------------------------------------------------------------

    def _exchange_keys(self, run: Executor, instance: UUID, now: float, term_seconds: float) -> None:
        lane = self._keyed
        if lane is None:
            return
        if lane.must_release or now >= self._release_at:
            self._release_at = now + _RELEASE_SECONDS
            if spare := lane.spare(now):
                slots.release(run, self._key, instance, spare)
        most = lane.room if self._calls.room > 0 else 0
        if most > 0 and self._has_token(now) and (asked := lane.asks(most)):
            taken: dict[str, set[int]] = {}
            try:
                taken = slots.take(run, self._key, instance, asked, limit=lane.per_key, term_seconds=term_seconds)
            finally:
                # If the statement has failed, the keys ask again later.
                lane.grant(asked, taken, time.monotonic())
