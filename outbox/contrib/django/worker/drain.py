"""Workers that end by themselves: after all work that is due now, or when no message is left on the broker."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final
from uuid import UUID

from outbox.contrib.django.engine.broker import engine_of, flush, get_engine
from outbox.contrib.django.publishing.checkback import run_check_back
from outbox.contrib.django.settings.conf import get_settings
from outbox.contrib.django.subscribers.registry import autodiscover
from outbox.contrib.django.worker.workers import consumer_runtime, run_all
from outbox.errors import BrokerUnavailable
from outbox.ports import ConsumeCounts, LeftoverWork

logger = logging.getLogger(__name__)

_LOOK_SECONDS: Final = 5.0
# A count of the remaining messages reads every message in the broker. So the pause after a count is the duration of the
# count, multiplied by this number.
_REST_FACTOR: Final = 5


@dataclass(frozen=True, kw_only=True, slots=True)
class DrainCounts:
    """The counts of a drain: messages put into queues, and deliveries handled or failed.

    `elsewhere` counts the messages that wait in queues of other consumer processes that are alive.
    """

    queued: int = 0
    handled: int = 0
    failed: int = 0
    elsewhere: int = 0


def queue_messages() -> int:
    """Send end messages, run check-back, and put decided messages into queues. Return the number of queued messages.

    Raises the errors of these steps.
    """
    flush()
    if get_settings().producer_group:
        run_check_back()
    return get_engine().sequence()


def drain(*, groups: Sequence[str] = ()) -> DrainCounts:
    """Send, check back, sequence and handle messages, and repeat this until no work is due.

    The parameter `groups` limits the drain to these groups. Messages and retries that are not due yet stay in the
    broker. Workers may run at the same time. If the engine cannot find out which work is due, the function raises
    NotSupported. The function also raises the errors of its steps.
    """
    get_engine().refusals.require("run_once", "handling the messages that are due now")
    runtime, queued, handled, failed = consumer_runtime(groups=groups), 0, 0, 0
    while True:
        appended = queue_messages()
        counts = runtime.run_once()
        queued, handled, failed = queued + appended, handled + counts.handled, failed + counts.failed
        if not appended and counts == ConsumeCounts():
            return DrainCounts(queued=queued, handled=handled, failed=failed)


# The pause between two looks at the queues of other processes.
_OWNERS_SECONDS: Final = 0.25


def drain_after_others() -> DrainCounts:
    """Drain like `drain`, and also wait for the queues of consumer processes that have died.

    A process that was killed keeps its queues until its leases expire. If another process still holds a queue when a
    whole lease has passed, this process is alive and handles the messages of the queue itself.
    """
    engine, total = get_engine(), DrainCounts()
    first_seen: dict[tuple[int, UUID], float] = {}
    while True:
        held = engine.held_elsewhere()
        counts = drain()
        total = DrainCounts(
            queued=total.queued + counts.queued,
            handled=total.handled + counts.handled,
            failed=total.failed + counts.failed,
        )
        waiting = engine.held_elsewhere()
        if not waiting and not held:
            return total
        # If the last lease expired after this drain, the next one handles the messages of its queue.
        holders = {one.holder for one in waiting}
        while waiting and {one.holder for one in waiting} == holders:
            now = time.monotonic()
            if now - max(first_seen.setdefault(holder, now) for holder in holders) > get_settings().lease_seconds:
                return replace(total, elsewhere=sum(one.messages for one in waiting))
            time.sleep(_OWNERS_SECONDS)
            waiting = engine.held_elsewhere()


def run_until_drained(stop: threading.Event) -> LeftoverWork:
    """Run all roles until no message waits on OUTBOX['BROKER'], or until `stop` is set.

    Return the last count of the remaining messages. While the worker runs, only handlers of this project may publish on
    this broker. If `Engine.leftover_work` raises a UsageError, the worker ends with this error, because it could never
    count the messages.
    """
    autodiscover()
    engine = engine_of(get_settings())
    last: list[LeftoverWork] = [engine.leftover_work()]
    failed: list[BaseException] = []

    def watch() -> None:
        try:
            last.append(_until_nothing_waits(stop, engine.leftover_work))
        except BaseException as error:
            failed.append(error)
        finally:
            stop.set()

    watching = threading.Thread(target=watch, name="outbox-until-drained", daemon=True)
    watching.start()
    run_all(stop)
    watching.join()
    if failed:
        raise failed[0]
    return last[-1]


def _until_nothing_waits(stop: threading.Event, look: Callable[[], LeftoverWork]) -> LeftoverWork:
    """Wait until two counts in a row find no message, and no message was written between the two counts.

    Return the last count. If `stop` is set, return the last count even if it found messages.
    """
    before, said = LeftoverWork(["the messages on the broker were not counted"]), ""
    while True:
        began = time.monotonic()
        try:
            found = look()
        except BrokerUnavailable as error:
            logger.warning("the messages that are left on the broker cannot be counted: %s", error)
            found = LeftoverWork(["the broker did not answer, so its messages were not counted"])
        if not found.waiting and before == found:
            return found
        if (text := "; ".join(found.waiting)) != said:
            logger.info("messages left on the broker: %s", text or "none, counting once more")
        before, said = found, text
        if stop.wait(max(_LOOK_SECONDS, _REST_FACTOR * (time.monotonic() - began))):
            return found
