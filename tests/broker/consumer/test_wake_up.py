"""No wake-up is lost, at any moment at which it is set."""

from __future__ import annotations

import socket
import threading
from typing import Any

import pytest

from outbox.broker.consumer.dispatcher import WakeUp


class SetDuringRecv:
    """A socket whose first `recv` sets the wake-up, as another thread could."""

    def __init__(self, wake_up: WakeUp, real: socket.socket) -> None:
        self._wake_up, self._real, self._first = wake_up, real, True

    def recv(self, size: int) -> bytes:
        received = self._real.recv(size)
        if self._first:
            self._first = False
            self._wake_up.set()
        return received

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)


@pytest.mark.parametrize("set_before", [False, True])
def test_a_set_during_a_clear_does_not_mute_the_next(set_before: bool) -> None:
    wake_up = WakeUp()
    real = wake_up.socket
    if set_before:
        wake_up.set()
    wake_up.socket = SetDuringRecv(wake_up, real)  # type: ignore[assignment]
    wake_up.clear()
    wake_up.socket = real
    wake_up.set()
    woken = threading.Event()

    def wait() -> None:
        wake_up.wait(30)
        woken.set()

    waiter = threading.Thread(target=wait)
    waiter.start()
    assert woken.wait(10), "the wake-up set after the clear woke no thread"
    waiter.join()
    wake_up.close()
