"""A worker that ends by itself, for a project that moves to another broker; the workers of the new one already run."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Final

from outbox.contrib.django.operations.left_behind import left_here
from outbox.contrib.django.settings.conf import get_settings
from outbox.contrib.django.subscribers.registry import autodiscover
from outbox.contrib.django.worker.workers import run_all
from outbox.errors import BrokerUnavailable
from outbox.ports import LeftoverWork
from outbox.rocketmq.left import Timers

logger = logging.getLogger(__name__)

_LOOK_SECONDS: Final = 5.0
# Each count reads every message in the broker: pause longer than the count took.
_REST_FACTOR: Final = 5


def run_until_drained(stop: threading.Event, brokers: Sequence[str] = ()) -> LeftoverWork:
    """Run all roles until no message waits on OUTBOX['BROKER'] any more, or until `stop`; returns the last count.

    Only handlers of this project that run there may still publish there. `brokers`: see `left_here`, whose usage errors
    end the worker, because it could never finish.
    """
    autodiscover()
    settings = get_settings()
    timers = Timers()
    last: list[LeftoverWork] = [left_here(settings, brokers, timers=timers)]
    failed: list[BaseException] = []

    def watch() -> None:
        try:
            last.append(_until_nothing_waits(stop, lambda: left_here(settings, brokers, timers=timers)))
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
