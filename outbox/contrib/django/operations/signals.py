"""Django signals about the work of outbox, and the thread that sends them.

One thread, `outbox-signals`, sends all signals of a process one after the other, so a receiver that hangs delays only
the receivers after it, never a handler, a fetch or a pass. Django logs the error of a receiver. The sender of each
signal is None. If more than MOST_WAITING signals wait, the process drops and logs further ones. With
OUTBOX['IN_MEMORY'] the calling thread sends the signal, so that a test sees the effect at once.

A signal is sent at most once: a process that dies between an event and its signal loses the signal.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final

from django.db import close_old_connections
from django.dispatch import Signal

from outbox.contrib.django.settings.conf import get_settings
from outbox.utils.given_up import GivenUp
from outbox.utils.safe_text import printable

logger = logging.getLogger(__name__)

# Arguments: group, topic, key, message_id, attempts, error. Sent by the consumer process that gave the message up,
# after the dead letter is committed.
message_dead_lettered = Signal()
# Arguments: name, subject, severity ("warning" or "critical"; "ok" when the condition is over), text, next_step,
# since. Sent by one process with the role check.
condition_changed = Signal()
# Arguments: roles. Sent by each process of a worker.
worker_started = Signal()
# Arguments: roles, error (None, or the exception that ended the process). A process that is killed does not send it.
worker_stopped = Signal()

MOST_WAITING: Final = 1000
# A process that ends waits at most this number of seconds for receivers that still run.
_FLUSH_SECONDS: Final = 2.0

_Waiting = tuple[str, Signal, Mapping[str, Any]]


class _SendingThread:
    """Sends signals on a daemon thread, which starts with the first signal."""

    def __init__(self) -> None:
        self._waiting: queue.Queue[_Waiting] = queue.Queue(MOST_WAITING)
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def put(self, one: _Waiting) -> None:
        """Send the signal soon. If too many signals wait, log the signal and drop it."""
        with self._lock:
            # A forked process has no thread of its parent.
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._send_all, name="outbox-signals", daemon=True)
                try:
                    self._thread.start()
                except RuntimeError as error:
                    logger.error("the signal %s waits for the next one, because no thread can start: %s", one[0], error)
        try:
            self._waiting.put_nowait(one)
        except queue.Full:
            logger.error(
                "the signal %s is lost, because %d signals wait for slow receivers: %s", one[0], MOST_WAITING, one[2]
            )

    def flush(self, seconds: float) -> bool:
        """Wait at most this time until all signals are sent. Return whether they are."""
        done = self._waiting.all_tasks_done
        with done:
            return done.wait_for(lambda: not self._waiting.unfinished_tasks, seconds)

    def _send_all(self) -> None:
        while True:
            name, signal, arguments = self._waiting.get()
            try:
                # Django renews the connections of a thread only at the start of a request.
                close_old_connections()
                signal.send_robust(sender=None, **arguments)
                close_old_connections()
            except Exception as error:
                logger.error("the receivers of the signal %s could not be called", name, exc_info=printable(error))
            finally:
                self._waiting.task_done()


_thread = _SendingThread()


def send(signal_name: str, /, **arguments: Any) -> None:
    """Send the signal of this module with this name. Without receivers, do nothing. Never raises, never waits."""
    signal: Signal = globals()[signal_name]
    if not signal.has_listeners(None):
        return
    if get_settings().in_memory:
        signal.send_robust(sender=None, **arguments)
    else:
        _thread.put((signal_name, signal, arguments))


def send_dead_lettered(given_up: GivenUp) -> None:
    """Send `message_dead_lettered` (the listener of `outbox.utils.given_up`)."""
    send(
        "message_dead_lettered",
        group=given_up.group,
        topic=given_up.topic,
        key=given_up.key,
        message_id=given_up.message_id,
        attempts=given_up.attempts,
        error=given_up.error,
    )


def flush(seconds: float = _FLUSH_SECONDS) -> bool:
    """Wait at most this time until all signals of this process are sent. Return whether they are."""
    return _thread.flush(seconds)


@contextmanager
def working(roles: Sequence[str]) -> Iterator[None]:
    """Send `worker_started` now, and `worker_stopped` at the end of the block, with the error that ended it."""
    failure: BaseException | None = None
    send("worker_started", roles=tuple(roles))
    try:
        yield
    except BaseException as error:
        failure = error
        raise
    finally:
        send("worker_stopped", roles=tuple(roles), error=failure)
        if not flush():
            logger.warning("process %d ends while receivers of signals still run", os.getpid())
