"""No ring is lost, whenever it comes."""

from __future__ import annotations

import socket
import threading
from typing import Any

import pytest

from outbox.broker.consumer.bell import WakeUp


class RungMeanwhile:
    """A socket during whose first `recv` somebody rings: it lets other threads run."""

    def __init__(self, bell: WakeUp, real: socket.socket) -> None:
        self._bell, self._real, self._first = bell, real, True

    def recv(self, size: int) -> bytes:
        received = self._real.recv(size)
        if self._first:
            self._first = False
            self._bell.ring()
        return received

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)


@pytest.mark.parametrize("rung_before", [False, True])
def test_a_ring_while_the_last_one_is_answered_does_not_mute_the_next(rung_before: bool) -> None:
    bell = WakeUp()
    real = bell.socket
    if rung_before:
        bell.ring()
    bell.socket = RungMeanwhile(bell, real)  # type: ignore[assignment]
    bell.answer()
    bell.socket = real
    bell.ring()
    woken = threading.Event()

    def wait() -> None:
        bell.wait(30)
        woken.set()

    waiter = threading.Thread(target=wait)
    waiter.start()
    assert woken.wait(10), "the ring after the answer woke nobody"
    waiter.join()
    bell.close()
