"""Waking the one thread that waits on a socket, from other threads."""

from __future__ import annotations

import contextlib
import select
import socket


class WakeUp:
    """`ring` makes `socket` readable until `answer`. Ringing again before that costs nothing."""

    def __init__(self) -> None:
        self.socket, self._rope = socket.socketpair()
        self.socket.setblocking(False)
        self._rope.setblocking(False)
        self._rung = False

    def ring(self) -> None:
        """Wake the waiting thread. Whatever it should see must be in place before."""
        if not self._rung:
            self._rung = True
            # Full or closed: it is awake or gone.
            with contextlib.suppress(OSError):
                self._rope.send(b"!")

    def wait(self, seconds: float) -> None:
        """Wait until it is rung, at most so long."""
        poller = select.poll()
        poller.register(self.socket, select.POLLIN)
        poller.poll(seconds * 1000)

    def answer(self) -> None:
        """Be ready for the next ring; look at what there is to do after this, not before."""
        with contextlib.suppress(OSError):
            # More than that many rings cannot be there.
            self.socket.recv(64)
        # Only now: whoever rings between the two would find its ring taken and all later ones muted.
        self._rung = False

    def close(self) -> None:
        """Release the sockets."""
        self.socket.close()
        self._rope.close()
