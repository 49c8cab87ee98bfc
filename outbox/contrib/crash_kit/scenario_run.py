"""One run of a scenario in a child process: the scenario, then everything that follows from it.

The functions here run in child processes. They install the hooks that note steps, kill or pause the process, put
messages back, and deliver messages again.
"""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import wraps
from pathlib import Path
from typing import Any, Final

from outbox.contrib.crash_kit.baseline import Baseline
from outbox.contrib.crash_kit.outside import OutsideCalls
from outbox.contrib.crash_kit.settling import release, settle_everything
from outbox.contrib.crash_kit.steps import Step, Walk, failed_at
from outbox.contrib.django.engine.broker import flush
from outbox.contrib.django.subscribers.again import HandledCall, deliver_again, handled_call
from outbox.contrib.django.subscribers.registry import subscriptions
from outbox.errors import HandlerError
from outbox.ports import AnyHandler
from outbox.subscription import Mode, OnError
from outbox.utils.safe_text import error_line

# How long a paused handler waits for another handler that is neither ready nor blocked by a lock.
_PAUSE_SECONDS: Final = 0.5
_POLL_SECONDS: Final = 0.005


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """What a run does besides the scenario. `seed` is None if the deliveries keep their order."""

    kill_at: Step | None = None
    pause_at: Step | None = None
    seed: int | None = None
    duplicates: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Surroundings:
    """What all runs of one crash test share."""

    scenario: Callable[[], object]
    groups: Sequence[str]
    kill_scenario: bool
    calls: OutsideCalls
    baseline: Baseline
    steps_file: Path
    within_seconds: float

    @property
    def has_subscribers(self) -> bool:
        """Whether a message of the scenario could have a handler."""
        return bool(subscriptions(groups=self.groups))


def run_plan(shared: Surroundings, plan: Plan) -> None:
    """Run the scenario and its messages, as the plan says. The child process of a run calls this function."""
    run = _Run(shared, plan)
    if shared.kill_scenario:
        run.watch()
        run.walk.enter(shared.scenario)
    shared.scenario()
    run.walk.leave()
    flush(within_seconds=shared.within_seconds)
    if not shared.kill_scenario:
        run.watch()
    run.settle()
    if plan.duplicates:
        deliver_again(run.handled)
        # A handler without an inbox may have published again.
        run.settle()


def settle_after_kill(shared: Surroundings) -> None:
    """Handle everything that the killed process has left. A second process calls this function."""
    release()
    printed: set[str] = set()
    settle_everything(
        groups=shared.groups,
        within_seconds=shared.within_seconds,
        wrap=lambda handler: _printing(handler, printed),
        has_subscribers=shared.has_subscribers,
    )


def _printing(handler: AnyHandler, printed: set[str]) -> AnyHandler:
    """Return the handler, which prints each error once. The report shows what the last process has printed."""

    @wraps(handler)
    def called(given: Any) -> Any:
        try:
            return handler(given)
        except Exception as error:
            group = handled_call(handler, given).subscription.group
            text = f"the handler of group {group!r} failed: {error_line(error)}\n{failed_at(error)}"
            if text not in printed:
                printed.add(text)
                print(text)
            raise

    return called


class _PutBack(HandlerError):
    """The kit puts this message back, so that it comes after later messages."""


@dataclass
class _Run:
    """The hooks of one run."""

    shared: Surroundings
    plan: Plan
    handled: list[HandledCall] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self._ended = 0
        self._waits: dict[Any, bool] = {}
        self._printed: set[str] = set()
        self._random = random.Random(self.plan.seed)
        act = _kill if self.plan.kill_at else self._pause
        self.walk = Walk(self.shared.steps_file, self.plan.kill_at or self.plan.pause_at, act)

    def watch(self) -> None:
        """Note steps from now on, and kill or pause the process at the step of the plan."""
        self.walk.install()
        self.shared.calls.reached = self.walk.reach

    def settle(self) -> None:
        """Handle everything that waits."""
        settle_everything(
            groups=self.shared.groups,
            within_seconds=self.shared.within_seconds,
            seed=self.plan.seed or 0,
            wrap=self.wrap,
            has_subscribers=self.shared.has_subscribers,
            overlapping=self.plan.pause_at is not None,
        )

    def wrap(self, handler: AnyHandler) -> AnyHandler:
        """Return the function that the consumer calls instead of the handler."""
        printing = _printing(handler, self._printed)

        @wraps(handler)
        def called(given: Any) -> Any:
            call = handled_call(handler, given)
            self._put_back(call)
            self.walk.enter(handler, f"{call.subscription.group} {call.subscription.topic}")
            result = printing(given)
            with self._lock:
                self._ended += 1
                self.handled.append(call)
            return result

        return called

    def _put_back(self, call: HandledCall) -> None:
        """Let a random half of the messages fail their first attempt, so that they come later."""
        subscription = call.subscription
        if self.plan.seed is None or subscription.mode is not Mode.CONCURRENT or subscription.batch > 1:
            return
        [delivery] = call.deliveries
        with self._lock:
            # outbox may repeat a call without a new attempt, so the choice is kept.
            waits = self._waits.setdefault(delivery.message_id, self._random.random() < 0.5) and delivery.attempt == 1
        # Each error has a text of its own. Equal errors in a row would count as an outage.
        error = _PutBack(f"the crash kit delivers message {delivery.message_id} later")
        is_retried = not subscription.retry.exhausted(delivery.attempt)
        if waits and is_retried and subscription.reaction(error) is OnError.RETRY:
            raise error

    def _pause(self) -> None:
        """Wait until another handler has ended or waits for a lock."""
        before, deadline = self._ended, time.monotonic() + _PAUSE_SECONDS
        while self._ended == before and time.monotonic() < deadline:
            if self.shared.baseline.waits_for_lock():
                return
            time.sleep(_POLL_SECONDS)


def _kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
    # The signal ends the process before this thread could do anything else.
    signal.pause()
