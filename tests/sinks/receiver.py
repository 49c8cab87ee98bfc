"""A receiver of webhooks: a real HTTP server, in a thread with answers of a test's own, or as a process to be killed.

`python -m tests.sinks.receiver PORT FILE SECRET` verifies, appends the requests to FILE, and answers 204.
"""

from __future__ import annotations

import contextlib
import json
import ssl
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from outbox.contrib.forwarding.sinks.signatures import secret_bytes, sign

SECRET = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"


@dataclass(frozen=True)
class Request:
    """The received requests."""

    headers: Mapping[str, str]
    body: bytes


@dataclass(frozen=True)
class Answer:
    """The answer to a request."""

    status: int = 204
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b""


def keeping(got: list[Request], answer: Answer | None = None) -> Callable[[Request], Answer]:
    """Answers as given and keeps the requests."""

    def respond(request: Request) -> Answer:
        got.append(request)
        return answer or Answer()

    return respond


class Server(ThreadingHTTPServer):
    """Answers each POST with the result of a function. Stopping it waits for no connection that is kept open."""

    daemon_threads = True
    request_queue_size = 100

    def __init__(self, address: tuple[str, int], respond: Callable[[Request], Answer]) -> None:
        super().__init__(address, _Handler)
        self.respond = respond


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Server

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        answer = self.server.respond(Request({name.lower(): value for name, value in self.headers.items()}, body))
        self.send_response(answer.status)
        for name, value in answer.headers.items():
            self.send_header(name, value)
        if answer.status != 204:
            self.send_header("Content-Length", str(len(answer.body)))
        self.end_headers()
        self.wfile.write(answer.body)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@contextlib.contextmanager
def serving(
    respond: Callable[[Request], Answer], *, host: str = "127.0.0.1", port: int = 0, tls: ssl.SSLContext | None = None
) -> Iterator[int]:
    """A server in a thread; its port."""
    server = Server((host, port), respond)
    if tls is not None:
        server.socket = tls.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield server.server_address[1]
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def main() -> None:
    port, file, secret = int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
    lock = threading.Lock()

    def respond(request: Request) -> Answer:
        message_id, stamp = request.headers["webhook-id"], int(request.headers["webhook-timestamp"])
        assert request.headers["webhook-signature"] == sign([secret_bytes(secret)], message_id, stamp, request.body)
        entry = {"id": message_id, "key": request.headers.get("outbox-key", ""), **json.loads(request.body)}
        with lock, file.open("a") as out:
            out.write(json.dumps(entry) + "\n")
        return Answer()

    Server(("127.0.0.1", port), respond).serve_forever()


if __name__ == "__main__":
    main()
