"""TCP to a Unix socket by splice(2): Spark's JDBC driver knows no Unix sockets, the embedded server nothing else."""

from __future__ import annotations

import os
import socket
import sys
import threading

_PIECE = 1 << 20


def main(path: str) -> None:
    """Relay every connection to the socket at `path`; prints the port."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        print(server.getsockname()[1], flush=True)
        while True:
            client, _ = server.accept()
            upstream = socket.socket(socket.AF_UNIX)
            upstream.connect(path)
            for source, target in ((client, upstream), (upstream, client)):
                threading.Thread(target=_copy, args=(source, target), daemon=True).start()


def _copy(source: socket.socket, target: socket.socket) -> None:
    out_of, into = os.pipe()
    try:
        while count := os.splice(source.fileno(), into, _PIECE):
            while count:
                count -= os.splice(out_of, target.fileno(), count)
    except OSError:
        pass
    finally:
        os.close(out_of)
        os.close(into)
        for end in (source, target):
            try:
                end.shutdown(socket.SHUT_RDWR)
            except OSError:
                continue


if __name__ == "__main__":
    main(sys.argv[1])
