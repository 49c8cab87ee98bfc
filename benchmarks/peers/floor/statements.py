"""The statements of the request's block, prepared once per thread; the least log uses them with its own texts."""

from __future__ import annotations

import threading
from collections.abc import Mapping

from django.db import connection as application

from benchmarks.peers import orm
from benchmarks.peers.floor.project import TWO_PHASE, Prepared, connect


class Statements:
    """`send` on one database; `half`, `ledger` and `end` on two. Each thread has its own connections."""

    def __init__(self, texts: Mapping[str, str]) -> None:
        self._texts = texts
        self._of_thread = threading.local()

    def prepare(self) -> None:
        """Connect and prepare, if this thread has not yet."""
        if hasattr(self._of_thread, "prepared"):
            return
        application.ensure_connection()
        raw = application.connection
        broker = connect() if TWO_PHASE else raw
        names = ("half", "ledger", "end") if TWO_PHASE else ("send",)
        self._of_thread.prepared = {
            name: Prepared(raw if name == "ledger" else broker, name, self._texts[name]) for name in names
        }
        # Its owner, so that it stays open.
        self._of_thread.broker = broker

    def __call__(self, name: str, *values: str) -> list[list[bytes | None]]:
        prepared: Prepared = self._of_thread.prepared[name]
        return prepared(*values)


def prepare_tables(tables: str) -> None:
    """Create the tables of Django's models, and `tables` in each database."""
    orm.prepare()
    with application.cursor() as cursor:
        cursor.execute(tables)
    if TWO_PHASE:
        with connect() as broker:
            broker.execute(tables)
