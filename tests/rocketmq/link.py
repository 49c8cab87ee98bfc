"""A network between clients and one server, which a test can cut: bytes then wait, and no connection is closed."""

from __future__ import annotations

import contextlib
import socket
import threading
from typing import Final

_PIECE: Final = 65536


class Link:
    """Listens on `port` of 127.0.0.1 and forwards each connection to the server's port."""

    def __init__(self, server_port: int) -> None:
        self._server_port = server_port
        self._whole = threading.Event()
        self._whole.set()
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listening.getsockname()[1]
        self._sockets: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._closed = False
        threading.Thread(target=self._accept, name=f"link-{self.port}", daemon=True).start()

    def cut(self) -> None:
        """Hold all bytes in both directions, those of new connections too."""
        self._whole.clear()

    def mend(self) -> None:
        """Forward the held bytes, and all that follow."""
        self._whole.set()

    def is_used(self) -> bool:
        """Whether a client is connected."""
        with self._lock:
            return bool(self._sockets)

    def close(self) -> None:
        """Close all connections."""
        self._closed = True
        self._whole.set()
        with contextlib.suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()
        with self._lock:
            for one in self._sockets:
                with contextlib.suppress(OSError):
                    one.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        while not self._closed:
            try:
                client, _ = self._listening.accept()
            except OSError:
                return
            threading.Thread(target=self._connect, args=(client,), daemon=True).start()

    def _connect(self, client: socket.socket) -> None:
        self._whole.wait()
        try:
            server = socket.create_connection(("127.0.0.1", self._server_port), 5)
        except OSError:
            client.close()
            return
        server.settimeout(None)
        with self._lock:
            self._sockets |= {client, server}
        back = threading.Thread(target=self._forward, args=(server, client), daemon=True)
        back.start()
        self._forward(client, server)
        back.join()
        with self._lock:
            self._sockets -= {client, server}
        client.close()
        server.close()

    def _forward(self, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while piece := source.recv(_PIECE):
                self._whole.wait()
                target.sendall(piece)
        for one in (source, target):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
