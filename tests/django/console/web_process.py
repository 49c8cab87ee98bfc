"""The pages as a process of their own, which a test can freeze, kill and start again at the same address."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psycopg
from django.contrib.auth.models import User

from tests.django.console.support import Site
from tests.django.processes import process
from tests.servers import free_ports
from tests.support import eventually


class WebProcess:
    """One web process after the other at one address."""

    def __init__(self, user: User, *, refresh_seconds: float) -> None:
        [self._port] = free_ports(1)
        self.site = Site(f"http://127.0.0.1:{self._port}", user)
        self._refresh_seconds = refresh_seconds
        self._running: Any = None
        self._process: Any = None

    def start(self) -> None:
        """Start one, and wait until it serves."""
        module = ["-m", "tests.django.console.web_server", str(self._port), str(self._refresh_seconds)]
        settings = {"DJANGO_SETTINGS_MODULE": "tests.django.console.web_settings"}
        self._running = process(module, quiet=True, variables=settings)
        self._process = self._running.__enter__()
        assert self._process.stdout.readline() == "serving\n"

    def kill(self) -> None:
        """End it without warning."""
        self._process.kill()
        self.end()

    def freeze(self, *, frozen: bool = True) -> None:
        """Stop its answers, or let it continue. Connections to it still succeed."""
        self._process.send_signal(signal.SIGSTOP if frozen else signal.SIGCONT)

    def end(self) -> None:
        """End it."""
        if self._running is not None:
            self._process.send_signal(signal.SIGCONT)
            self._running.__exit__(None, None, None)
            self._running = None


@contextmanager
def web_process(user: User, *, refresh_seconds: float = 0.5) -> Iterator[WebProcess]:
    """A web process that serves the pages to a user."""
    web = WebProcess(user, refresh_seconds=refresh_seconds)
    web.start()
    try:
        yield web
    finally:
        web.end()


def kill_server(pid: int, url: str) -> None:
    """Kill a PostgreSQL and wait until no part of it runs."""
    os.kill(pid, signal.SIGQUIT)

    def is_gone() -> bool:
        try:
            psycopg.connect(url, connect_timeout=2).close()
        except psycopg.OperationalError:
            return True
        return False

    eventually(is_gone, what="the end of the server")
