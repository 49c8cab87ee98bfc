"""Liveness and readiness of a worker, from the heartbeats of its processes.

The worker also serves liveness and readiness over HTTP, and what parts add (`hooks.add_served`). A worker is live if
its first process runs and every process has a recent heartbeat. If a worker is not live, restart the worker. A worker
is ready if every process can also reach the broker. Neither probe reads a database, so an unreachable database causes
no restart.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from ipaddress import ip_address
from pathlib import Path
from typing import Any, Final

from django.db import connections

from outbox import hooks
from outbox.broker.operations.conditions import Condition, ConditionReport, Severity, of_text, worst_first
from outbox.contrib.django.operations.watching import is_authorized
from outbox.contrib.django.settings.conf import get_settings
from outbox.contrib.django.worker.roles import FIRST_PROCESS, SUFFIX, prepare_health_files
from outbox.utils import heartbeat
from outbox.utils.process_identity import has_ended

logger = logging.getLogger(__name__)

# A loop writes its heartbeat every second. The loop notices a broken connection within 15 s. If a database accepts
# connections but never answers, the probe cannot distinguish a loop that waits for the database from a loop that hangs.
LIVE_SECONDS: Final = 30.0


@contextmanager
def alone(name: str) -> Iterator[None]:
    """Write and serve a heartbeat of this process during the block. Use this block if the process has no supervisor."""
    files = prepare_health_files([name])[name]
    os.environ.update({key: value for key, value in files.items() if key == heartbeat.VARIABLE})
    with served():
        yield


def live() -> ConditionReport:
    """Return whether every process that the worker has started has a recent heartbeat."""
    return worst_first(_not_live(_hearts()))


def ready() -> ConditionReport:
    """Return whether every process is live and can do its work."""
    hearts = _hearts()
    waiting = [
        of_text(
            "worker_not_ready",
            Severity.WARNING,
            f"{heart.name} waits for the broker",
            "The process continues as soon as the broker answers. `manage.py outbox_status` shows the cause.",
        )
        for heart in hearts
        if not heart.is_ready
    ]
    return worst_first([*_not_live(hearts), *waiting])


def _not_live(hearts: Sequence[heartbeat.SignOfLife]) -> Iterator[Condition]:
    if not hearts:
        yield of_text(
            "worker_missing",
            Severity.CRITICAL,
            "no worker has started on this machine",
            "Start a worker. If a worker already runs, give this command the same HEALTH_DIRECTORY as the worker.",
        )
    elif _has_ended():
        yield of_text("worker_missing", Severity.CRITICAL, "the worker on this machine has ended", "Start the worker.")
    for heart in hearts:
        if not heart.is_alive(within_seconds=LIVE_SECONDS):
            said = f"{heart.name} has not written a heartbeat for {heart.age_seconds or 0:.0f} s"
            yield of_text("worker_late", Severity.CRITICAL, said, "Restart the worker.")


def _hearts() -> list[heartbeat.SignOfLife]:
    folder = get_settings().health_directory
    return [heartbeat.listen(path) for path in sorted(Path(folder).glob(f"*{SUFFIX}"))] if folder else []


def _has_ended() -> bool:
    """Whether the worker has certainly ended. From another container, only old heartbeats show the end."""
    try:
        return has_ended((Path(get_settings().health_directory or "") / FIRST_PROCESS).read_text())
    except OSError:
        return False


_PROBES: Final[Mapping[str, Callable[[], ConditionReport]]] = {"/live": live, "/ready": ready}


_REFUSAL: Final = (
    b"this is served to callers that send `Authorization: Bearer` with the token of OUTBOX['STATUS_TOKEN'];\n"
    b"without that setting only to callers on this machine: set STATUS_TOKEN, and the same token in the caller.\n"
)


def _content(path: str) -> tuple[str, bytes]:
    try:
        answer: tuple[str, bytes] = hooks.resolved(hooks.served[path])()
        return answer
    finally:
        # Each request runs on a new thread, so close the database connections of this thread.
        connections.close_all()


class _Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        if self.path in hooks.served:
            if self._may_read():
                self._answer(200, *_content(self.path))
            else:
                self._answer(403, "text/plain", _REFUSAL)
        elif (probe := _PROBES.get(self.path)) is not None:
            health = probe()
            text = json.dumps({"healthy": health.is_healthy, "problems": health.problems}).encode()
            self._answer(200 if health.is_healthy else 503, "application/json", text)
        else:
            self._answer(404, "text/plain", f"there are {' '.join((*_PROBES, *hooks.served))}\n".encode())

    def _may_read(self) -> bool:
        """Whether the caller may read what parts serve.

        If OUTBOX['STATUS_TOKEN'] is set, the caller must send the token. Without this setting, the caller must be on
        this machine.
        """
        if get_settings().status_token is None:
            caller = ip_address(self.client_address[0])
            # A socket of IPv6 shows the callers of IPv4 as `::ffff:127.0.0.1`.
            return (getattr(caller, "ipv4_mapped", None) or caller).is_loopback
        return is_authorized(self.headers.get("Authorization", ""))

    def _answer(self, status: int, content_type: str, text: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, format: str, *args: Any) -> None:
        logger.debug(format, *args)


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, host: str, port: int) -> None:
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        super().__init__((host, port), _Handler)


@contextmanager
def served() -> Iterator[tuple[Any, ...] | None]:
    """Serve /live, /ready and what parts serve at OUTBOX['HEALTH_ADDRESS'] during the block.

    If this setting is missing, serve nothing.

    Raises OSError if another process uses the port.
    """
    address = get_settings().health_address
    if address is None:
        yield None
        return
    host, _, port = address.rpartition(":")
    server = _Server(host.strip("[]"), int(port))
    thread = threading.Thread(target=server.serve_forever, name="outbox-health", daemon=True)
    thread.start()
    try:
        yield server.server_address
    finally:
        server.shutdown()
        server.server_close()
        thread.join(timeout=5)
