"""Wake the one thread that waits on a socket, from other threads."""

from __future__ import annotations

import contextlib
import select
import socket


class WakeUp:
    """`set` makes `socket` readable until `clear`. A second `set` before that costs nothing."""

    def __init__(self) -> None:
        self.socket, self._sender = socket.socketpair()
        self.socket.setblocking(False)
        self._sender.setblocking(False)
        self._is_set = False

    def set(self) -> None:
        """Wake the waiting thread. Store the data that it should see before this call."""
        if not self._is_set:
            self._is_set = True
            # The socket is full or closed: the thread is awake or gone.
            with contextlib.suppress(OSError):
                self._sender.send(b"!")

    def wait(self, seconds: float) -> None:
        """Wait until it is set, at most `seconds`."""
        poller = select.poll()
        poller.register(self.socket, select.POLLIN)
        poller.poll(seconds * 1000)

    def clear(self) -> None:
        """Reset it for the next `set`. Look for work after this call, not before."""
        with contextlib.suppress(OSError):
            # The socket never holds more bytes than this.
            self.socket.recv(64)
        # Last: if another thread called `set` in between, its byte would be gone and all later calls ignored.
        self._is_set = False

    def close(self) -> None:
        """Release the sockets."""
        self.socket.close()
        self._sender.close()
