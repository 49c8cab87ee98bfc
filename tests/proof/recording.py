"""A storm of the oracle whose steps are recorded, and what its databases have committed, in the order of their commits.

The server decodes its own log of changes (logical decoding), so the order is that of the commit records, in all
databases of the server, and not that of a clock. Nothing is added to a transaction of the product.
"""

from __future__ import annotations

import signal
import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from psycopg import sql

from tests.oracle import lines
from tests.oracle.server import SETTINGS, Server
from tests.oracle.storm import Plan, Storm

# Each has a primary key: a publication makes an UPDATE or DELETE of another table fail.
_TABLES: Final = (
    *("outbox_ledger", "outbox_inbox", "outbox_claim", "outbox_step", "shop_effect"),
    *("commit_log", "op_log", "pending_check", "incident", "consume_queue", "scheduled", "dead_letter"),
    *("queue_lease", "consumer_offset", "consumer", "life", "tick", "held"),
)
_PUBLICATION: Final = "recorded"
_FIND_TABLES: Final = """
SELECT relnamespace::regnamespace::text, relname FROM pg_class WHERE relkind = 'r' AND relname = ANY (%s)
"""
_DECODE: Final = """
SELECT data FROM pg_logical_slot_peek_binary_changes(%s, NULL, NULL, 'proto_version', '1', 'publication_names', %s)
"""

Row = dict[str, str | None]


@dataclass(frozen=True, slots=True)
class Change:
    """A committed change of one row. `commit` is the place of its transaction's commit record in the server's log.

    `row` has the columns of the new row as text; after DELETE those of the primary key.
    """

    commit: int
    is_delete: bool
    table: str
    row: Row


@dataclass(frozen=True, slots=True)
class Queue:
    """A queue's topic, and for a retry queue the group whose messages it has."""

    topic_id: int
    retry_of: int | None


@dataclass(frozen=True, slots=True)
class History:
    """What a storm has left: changes in the order of commits, lines of its processes, and the names of ids."""

    changes: Sequence[Change]
    lines: Sequence[dict[str, Any]]
    queues: dict[int, Queue]
    groups: dict[int, str]
    subscribed: set[tuple[int, int]]
    "(group id, topic id)"


class RecordedServer(Server):
    """A server whose log has enough to be decoded."""

    settings = SETTINGS | {"wal_level": "logical"}


class RecordedStorm(Storm):
    """A storm without restores, because a restored database has another log."""

    def __init__(self, plan: Plan, folder: Path, server: Server) -> None:
        super().__init__(plan, folder, server)
        self.environment["DJANGO_SETTINGS_MODULE"] = "tests.proof.recorded_settings"

    def set_up(self) -> None:
        """Databases and tables, and from now on what is committed in them."""
        super().set_up()
        for name in self.databases:
            with self.server.connection(name) as connection:
                found = connection.execute(_FIND_TABLES, [list(_TABLES)]).fetchall()
                if found:
                    tables = sql.SQL(", ").join(sql.Identifier(*table) for table in found)
                    connection.execute(sql.SQL("CREATE PUBLICATION {} FOR TABLE {}").format(_name(), tables))
                    connection.execute("SELECT pg_create_logical_replication_slot(%s, 'pgoutput')", [name])

    def strike(self, *, early: bool) -> None:
        """One fault."""
        faults = [self.kill, self.kill_worker, self.freeze, self.crash_server, self.end_sessions, self.cut]
        self.random.choices(faults, [6, 3, 4, 4, 3, 4])[0]()

    def ask_status(self) -> dict[str, Any]:
        """Nobody reads the status."""
        return {}

    def history(self) -> History:
        """What the storm has left. Its processes have ended."""
        changes: list[Change] = []
        for name in self.databases:
            with self.server.connection(name) as connection:
                slots = connection.execute("SELECT 1 FROM pg_replication_slots WHERE slot_name = %s", [name])
                if slots.fetchone():
                    changes += decoded(data for (data,) in connection.execute(_DECODE, [name, _PUBLICATION]))
        changes.sort(key=lambda change: change.commit)
        broker = self.databases[2 if self.plan.path == "two-phase" else 0]
        with self.server.connection(broker) as connection:
            connection.execute("SET search_path = outbox")
            return History(
                changes,
                list(lines.read(self.lines)),
                {
                    number: Queue(topic, retry_of)
                    for number, topic, retry_of in connection.execute(
                        "SELECT queue_id, topic_id, retry_of FROM queue JOIN topic USING (topic_id)"
                    )
                },
                dict(connection.execute("SELECT group_id, name FROM consumer_group").fetchall()),
                set(connection.execute("SELECT group_id, topic_id FROM subscription").fetchall()),
            )


def _name() -> sql.Identifier:
    return sql.Identifier(_PUBLICATION)


def record(plan: Plan, folder: Path, server: Server) -> History:
    """Run a storm, and return what it has left."""
    storm = RecordedStorm(plan, folder, server)
    storm.set_up()
    try:
        storm.blow()
        storm.settle()
        storm.stop_all(storm.workers, signal.SIGTERM)
        return storm.history()
    finally:
        storm.over.set()
        storm.stop_all(storm.clients + storm.workers, signal.SIGKILL)
        storm.drop()


def decoded(messages: Iterable[bytes]) -> Iterator[Change]:
    """The changes in messages of PostgreSQL's plugin `pgoutput`, version 1 of its protocol."""
    tables: dict[int, tuple[str, list[str]]] = {}
    commit = 0
    for message in messages:
        kind = message[:1]
        if kind == b"B":
            [commit] = struct.unpack_from("!Q", message, 1)
        elif kind == b"R":
            [number] = struct.unpack_from("!I", message, 1)
            _schema, table, rest = message[5:].split(b"\0", 2)
            tables[number] = (table.decode(), _columns(rest[3:]))
        elif kind in (b"I", b"U", b"D"):
            [number] = struct.unpack_from("!I", message, 1)
            table_name, columns = tables[number]
            row, place = _row(message, 6, columns)
            if kind == b"U" and message[5:6] in (b"K", b"O"):
                row, _ = _row(message, place + 1, columns)
            yield Change(commit, kind == b"D", table_name, row)


def _columns(rest: bytes) -> list[str]:
    """The names of columns: each has a byte before it, and two numbers of four bytes behind it."""
    names = []
    while rest:
        name, rest = rest[1:].split(b"\0", 1)
        names.append(name.decode())
        rest = rest[8:]
    return names


def _row(message: bytes, place: int, columns: Sequence[str]) -> tuple[Row, int]:
    """The row at a place of a message, and the place behind it. A value that has not changed may be missing."""
    row: Row = {}
    place += 2
    for name in columns:
        kind = message[place : place + 1]
        place += 1
        if kind == b"n":
            row[name] = None
        elif kind == b"t":
            [length] = struct.unpack_from("!I", message, place)
            row[name] = message[place + 4 : place + 4 + length].decode()
            place += 4 + length
    return row, place
