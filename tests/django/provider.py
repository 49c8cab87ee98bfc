"""A real HTTP server in the part of the other system: it counts calls, and acts once per idempotency key."""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Provider:
    """`calls` counts the requests by path. `acted` has the keys of the requests that took effect, by path.

    A request for a path in `held` is answered only when the test removes the path. A path in `failing` is refused.
    """

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self.acted: dict[str, list[str]] = {}
        self.held: set[str] = set()
        self.failing: set[str] = set()
        self.changed = threading.Condition()
        self.url = ""

    def answer(self, path: str, key: str) -> int:
        with self.changed:
            self.calls[path] += 1
            if path in self.failing:
                return 500
            known = self.acted.setdefault(path, [])
            if key not in known:
                known.append(key)
            self.changed.wait_for(lambda: path not in self.held, timeout=120)
        return 200

    def release(self, path: str = "") -> None:
        """Answer the requests of a path, or of all paths."""
        with self.changed:
            self.held -= {path} if path else set(self.held)
            self.changed.notify_all()


@contextlib.contextmanager
def provider() -> Iterator[Provider]:
    """A running server."""
    made = Provider()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            status = made.answer(self.path.removeprefix("/"), self.headers["Key"])
            # The process that asked may be dead.
            with contextlib.suppress(OSError):
                self.send_response(status)
                self.end_headers()
                self.wfile.write(b"done")

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    made.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield made
    finally:
        made.release()
        server.shutdown()
        thread.join()
        server.server_close()
