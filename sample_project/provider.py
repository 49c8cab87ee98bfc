"""A payment provider in a process of its own: `python -m sample_project.provider [PORT]`.

POST /charges charges the order in the body, once per Idempotency-Key. Some charges take seconds, as in life: the amount
is charged first, and the answer comes late. An amount above MOST is refused. GET /charges lists all charges, for the
demo and the tests.
The charges are in memory, so the process is no part of what the demo kills.
"""

from __future__ import annotations

import contextlib
import json
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from decimal import Decimal
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final

PORT: Final = 8010
PATH: Final = "/charges"
# Of this number of charges, the middle one is slow.
SLOW_EVERY: Final = 20
SLOW_SECONDS: Final = 3.0
# The largest charge in euro.
MOST: Final = Decimal(1000)


@dataclass(kw_only=True)
class Charge:
    """One charge. `requests` counts the requests with its key. Before `slow_until`, the first of them has no answer."""

    number: str
    order: int
    amount: str
    slow_until: float = 0.0
    requests: int = 0


class Provider(ThreadingHTTPServer):
    """The server. Two requests with one key are one charge, also at the same time."""

    daemon_threads = True
    # The default backlog of 5 refuses the connections of a burst.
    request_queue_size = 128

    def __init__(self, port: int = 0, *, slow_every: int = SLOW_EVERY, slow_seconds: float = SLOW_SECONDS) -> None:
        super().__init__(("127.0.0.1", port), _Handler)
        self._slow_every = slow_every
        self._slow_seconds = slow_seconds
        self._lock = threading.Lock()
        self._charges: dict[str, Charge] = {}
        self._closing = threading.Event()

    @property
    def url(self) -> str:
        """The address for `PAYMENT_PROVIDER`."""
        return f"http://127.0.0.1:{self.server_port}"

    def charge(self, key: str, order: int, amount: str) -> Charge:
        """Charge once per key. A repeated request is answered at once."""
        with self._lock:
            found = self._charges.get(key)
            is_slow = False
            if found is None:
                found = self._charges[key] = Charge(number=f"ch_{uuid.uuid4().hex}", order=order, amount=amount)
                is_slow = len(self._charges) % self._slow_every == self._slow_every // 2
            if is_slow:
                found.slow_until = time.time() + self._slow_seconds
            found.requests += 1
        if is_slow:
            self._closing.wait(self._slow_seconds)
        return found

    def charges(self) -> list[dict[str, Any]]:
        """All charges, the oldest first."""
        with self._lock:
            return [asdict(charge) for charge in self._charges.values()]

    def server_close(self) -> None:
        """Close, and end the waits of slow charges."""
        self._closing.set()
        super().server_close()


class _Handler(BaseHTTPRequestHandler):
    server: Provider

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        key = self.headers.get("Idempotency-Key", "")
        if self.path != PATH or not key:
            self.send_error(400, "POST /charges with the header Idempotency-Key")
            return
        if Decimal(body["amount"]) > MOST:
            self.send_error(402, f"the limit of a charge is {MOST} euro")
            return
        charge = self.server.charge(key, body["order"], body["amount"])
        # The process that asked may be dead.
        with contextlib.suppress(OSError):
            self._answer({"number": charge.number})

    def do_GET(self) -> None:
        if self.path != PATH:
            self.send_error(404)
            return
        self._answer(self.server.charges())

    def _answer(self, value: Any) -> None:
        body = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments: Any) -> None:
        """Log nothing: the demo reads the charges instead."""


@contextlib.contextmanager
def running(**options: Any) -> Iterator[Provider]:
    """A provider on a thread of this process, for tests."""
    server = Provider(**options)
    thread = threading.Thread(target=server.serve_forever, name="provider", daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def main() -> None:
    """Serve until SIGTERM or Ctrl-C."""
    server = Provider(int(sys.argv[1]) if len(sys.argv) > 1 else PORT)
    print(f"the payment provider answers at {server.url}{PATH}", flush=True)
    with contextlib.suppress(KeyboardInterrupt):
        server.serve_forever()


if __name__ == "__main__":
    main()
