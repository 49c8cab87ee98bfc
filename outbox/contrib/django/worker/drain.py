"""A worker that ends by itself: when no work is due now, or when nothing is left and the project can move away."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from outbox.contrib.django.engine.broker import engine_of, flush, get_engine
from outbox.contrib.django.publishing.checkback import run_check_back
from outbox.contrib.django.settings.conf import get_settings
from outbox.contrib.django.subscribers.registry import autodiscover
from outbox.contrib.django.worker.workers import consumer_runtime, run_all
from outbox.errors import BrokerUnavailable
from outbox.ports import AnyHandler, ConsumeCounts, LeftoverWork

logger = logging.getLogger(__name__)

_LOOK_SECONDS: Final = 5.0
# Each count reads every message in the broker: pause longer than the count took.
_REST_FACTOR: Final = 5


@dataclass(frozen=True, kw_only=True, slots=True)
class DrainCounts:
    """The counts: messages put into queues, and deliveries handled or failed."""

    queued: int = 0
    handled: int = 0
    failed: int = 0


def settle() -> int:
    """Report ends, check back and sequence; returns the number of messages put into queues. Raises their errors."""
    flush()
    run_check_back()
    return get_engine().sequence()


def drain(*, groups: Sequence[str] = (), wrap: Callable[[AnyHandler], AnyHandler] | None = None) -> DrainCounts:
    """Settle and consume repeatedly until no work is due.

    `groups`: only these; `wrap`: gets every handler, and returns the function to call instead. It does not wait for
    messages and retries that are due later. Workers may run at the same time. Raises the errors of its parts, and
    NotSupported on an engine that cannot know what is due.
    """
    get_engine().refusals.require("run_once", "handling what is due now")
    runtime, queued, handled, failed = consumer_runtime(groups=groups, wrap=wrap), 0, 0, 0
    while True:
        appended = settle()
        counts = runtime.run_once()
        queued, handled, failed = queued + appended, handled + counts.handled, failed + counts.failed
        if not appended and counts == ConsumeCounts():
            return DrainCounts(queued=queued, handled=handled, failed=failed)


def run_until_drained(stop: threading.Event, brokers: Sequence[str] = ()) -> LeftoverWork:
    """Run all roles until no message waits on OUTBOX['BROKER'] any more, or until `stop`; returns the last count.

    Only handlers of this project that run there may still publish there. `brokers`: see `Engine.left`, whose usage
    errors end the worker, because it could never finish.
    """
    autodiscover()
    engine = engine_of(get_settings())
    last: list[LeftoverWork] = [engine.left(brokers)]
    failed: list[BaseException] = []

    def watch() -> None:
        try:
            last.append(_until_nothing_waits(stop, lambda: engine.left(brokers)))
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
    """Wait for two looks in a row that find nothing, with nothing written in between.

    Returns the last look, also on `stop`.
    """
    before, said = LeftoverWork(["the broker was not examined"]), ""
    while True:
        began = time.monotonic()
        try:
            found = look()
        except BrokerUnavailable as error:
            logger.warning("the remaining messages cannot be counted: %s", error)
            found = LeftoverWork(["the broker did not answer"])
        if not found.waiting and before == found:
            return found
        if (text := "; ".join(found.waiting)) != said:
            logger.info("left on the broker: %s", text or "nothing, looking again")
        before, said = found, text
        if stop.wait(max(_LOOK_SECONDS, _REST_FACTOR * (time.monotonic() - began))):
            return found
