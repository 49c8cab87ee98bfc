"""Work in a thread of its own, with connections of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from django.db import connections, transaction


class Other:
    """A transaction in a thread of its own, which ends when the test says so."""

    def __init__(
        self, pool: ThreadPoolExecutor, work: Callable[[], Any], *, commits: bool = True, using: str = "default"
    ) -> None:
        self.done = threading.Event()
        self._end = threading.Event()
        self._commits = commits
        self._using = using
        self._future: Future[Any] = pool.submit(self._run, work)

    def _run(self, work: Callable[[], Any]) -> Any:
        try:
            with transaction.atomic(using=self._using):
                result = work()
                self.done.set()
                assert self._end.wait(60)
                if not self._commits:
                    transaction.set_rollback(True, using=self._using)
            return result
        finally:
            connections.close_all()

    def let_end(self) -> None:
        """Let the transaction end when its work is done."""
        self._end.set()

    def end(self) -> Any:
        """Let the transaction end, and return the result of its work."""
        self.let_end()
        return self._future.result(60)


def in_thread(work: Callable[[], Any]) -> Any:
    """The result of the work, or its error."""

    def run() -> Any:
        try:
            return work()
        finally:
            connections.close_all()

    with ThreadPoolExecutor(1) as pool:
        return pool.submit(run).result(60)
