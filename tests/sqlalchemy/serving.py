"""`python -m tests.sqlalchemy.serving SOCKET WORKERS`: uvicorn processes with the app of the page, on one socket.

It prints the id of each process. A process that dies is replaced at once, and all end with this one's input. They are
forked, so that the libraries are imported once. The module `shop` is in the working directory.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import sys
from importlib import import_module
from pathlib import Path


def serve(listening: socket.socket) -> None:
    import uvicorn

    config = uvicorn.Config(import_module("shop").app, log_level="warning", lifespan="off")
    uvicorn.Server(config).run(sockets=[listening])


def main() -> None:
    listening = socket.socket(fileno=int(sys.argv[1]))
    sys.path.insert(0, str(Path.cwd()))
    import_module("shop")
    import_module("uvicorn")
    running: set[int] = set()

    def start() -> None:
        if (child := os.fork()) == 0:
            serve(listening)
            os._exit(0)
        running.add(child)
        print(child, flush=True)

    for _ in range(int(sys.argv[2])):
        start()
    while not select.select([sys.stdin], [], [], 0.01)[0]:
        died, _ = os.waitpid(-1, os.WNOHANG)
        if died:
            running.remove(died)
            start()
    for child in running:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


if __name__ == "__main__":
    main()
