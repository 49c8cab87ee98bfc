"""WAL bytes per message by record and table, as pg_waldump shows them. Each publish is a transaction of its own.

The server makes no checkpoint and no autovacuum while it runs, so hardly any record has a full page image (the script
prints their bytes), and the figures of two runs differ by a few bytes. "Pages reused": retention has removed two thirds
of the messages, and vacuum has freed their space. OUTBOX_BENCH_MESSAGES: messages per measurement.
"""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

import psycopg

from benchmarks.bulk import BODY, PLAIN, prepared
from benchmarks.harness import server, table
from outbox.broker import embedded
from outbox.broker.database.connection import BrokerDatabase
from outbox.broker.database.executor import Executor
from outbox.broker.log import commit_log
from outbox.broker.log.topics import TopicCatalog
from outbox.broker.postgres import PostgresBroker
from outbox.broker.sequencer.sequencer import Sequencer
from outbox.message import Message
from outbox.transaction import Decision, EndTransaction, HalfTransaction

MESSAGES = int(os.environ.get("OUTBOX_BENCH_MESSAGES", "2000"))
TICKS = (1, 10, 100)
# Records of fewer bytes per message are only part of the sum.
_SHOWN_BYTES = 2
_RECORD = re.compile(r"^rmgr: (\w+) +len \(rec/tot\): +\d+/ +(\d+),.*? desc: (\S+)")
_BLOCK = re.compile(r"blkref #\d+: rel \d+/\d+/(\d+)[^,]*? blk \d+( FPW)?")


@dataclass(frozen=True)
class Record:
    """One record of the WAL: the file nodes of the tables and indexes whose pages it changes, and its size in bytes."""

    kind: str
    nodes: tuple[int, ...]
    size: int
    has_images: bool


def parse(lines: Iterable[str]) -> list[Record]:
    """The records that pg_waldump has printed."""
    found = []
    for line in lines:
        record = _RECORD.match(line)
        if record:
            manager, size, kind = record.groups()
            blocks = _BLOCK.findall(line)
            nodes = tuple(sorted({int(node) for node, _ in blocks}))
            found.append(Record(f"{manager} {kind}", nodes, int(size), any(image for _, image in blocks)))
    return found


@dataclass
class Case:
    """A broker with one topic, and the connections that write."""

    broker: PostgresBroker
    admin: psycopg.Connection
    publishing: psycopg.Connection
    tick: Callable[[], None]

    def atomic(self, catalog: TopicCatalog) -> None:
        with self.publishing.transaction():
            run = Executor(self.publishing, "outbox")
            message = Message(topic=PLAIN, body=BODY)
            commit_log.append_decided(run, catalog, [message], producer_group="bench", transactional=True)

    def two_phase(self, _: TopicCatalog) -> None:
        half = HalfTransaction(producer_group="bench", messages=[Message(topic=PLAIN, body=BODY)], ledger_id=uuid4())
        self.broker.send_half(half)
        self.broker.end(
            [EndTransaction(transaction_id=half.transaction_id, decision=Decision.COMMIT, producer_group="bench")]
        )

    def position(self) -> str:
        row = self.admin.execute("SELECT pg_current_wal_insert_lsn()::text").fetchone()
        assert row is not None
        return str(row[0])

    def records(self, waldump: Path, folder: Path, publish: Callable[[TopicCatalog], None], size: int) -> list[Record]:
        """The WAL of MESSAGES messages, with one tick after every `size` messages; without ticks for 0."""
        catalog = TopicCatalog()
        for _ in range(200):
            publish(catalog)
        self.tick()
        start = self.position()
        for number in range(1, MESSAGES + 1):
            publish(catalog)
            if size and number % size == 0:
                self.tick()
        end = self.position()
        # Its commit waits for the disk, so that pg_waldump finds all records.
        self.admin.execute("SELECT pg_logical_emit_message(true, 'bench', '')")
        command = [str(waldump), "--path", str(folder), "--start", start, "--end", end]
        printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        return parse(printed.splitlines())

    def fill(self, count: int) -> None:
        """Store and queue `count` messages: the first BRIN range of an empty table is maintained from the start."""
        catalog = TopicCatalog()
        for _ in range(0, count, 1000):
            messages = [Message(topic=PLAIN, body=BODY) for _ in range(1000)]
            commit_log.append_decided(Executor(self.publishing, "outbox"), catalog, messages)
        self.tick()

    def reuse_pages(self) -> None:
        """Remove two thirds of the messages, and free their space."""
        tables = ("consume_queue", "op_log", "commit_log")
        for name in tables:
            self.admin.execute(f"VACUUM outbox.{name}".encode())
        old = "(SELECT max(log_id) * 2 / 3 FROM outbox.commit_log)"
        self.admin.execute(f"DELETE FROM outbox.consume_queue WHERE log_id < {old}".encode())
        self.admin.execute(f"DELETE FROM outbox.op_log WHERE log_ids[1] < {old}".encode())
        self.admin.execute(f"DELETE FROM outbox.commit_log WHERE log_id < {old}".encode())
        for name in tables:
            self.admin.execute(f"VACUUM (TRUNCATE off) outbox.{name}".encode())

    def names(self) -> dict[int, str]:
        rows = self.admin.execute("SELECT pg_relation_filenode(oid), relname FROM pg_class WHERE relfilenode > 0")
        return {int(node): str(name) for node, name in rows}


def main() -> None:
    print(f"\nwal: {MESSAGES:,} messages of {len(BODY)} bytes, one publish at a time, inbox and ledger not included")
    totals = []
    with server(checkpoint_timeout="1d", autovacuum="off") as url, contextlib.ExitStack() as stack:
        target = embedded.create_database(url, "wal")
        broker = prepared(target)
        stack.callback(broker.close)
        admin, publishing = (stack.enter_context(psycopg.connect(target, autocommit=True)) for _ in range(2))
        database = BrokerDatabase(target)
        ticking = stack.enter_context(contextlib.closing(database.open()))
        sequencer = Sequencer(database, uuid4())

        def tick() -> None:
            while sequencer.run_once(ticking).more:
                pass

        case = Case(broker, admin, publishing, tick)
        [folder] = admin.execute("SELECT current_setting('data_directory') || '/pg_wal'").fetchone() or [""]
        [program] = admin.execute("SELECT setting FROM pg_config() WHERE name = 'BINDIR'").fetchone() or [""]
        for state in ("new pages", "pages reused"):
            case.fill(10 * MESSAGES)
            if state == "pages reused":
                case.reuse_pages()
            for path, publish in {"atomic": case.atomic, "two-phase": case.two_phase}.items():
                sums = []
                for size in (0, *TICKS):
                    found = case.records(Path(program) / "pg_waldump", Path(folder), publish, size)
                    sums.append(f"{sum(one.size for one in found) / MESSAGES:,.0f}")
                    if size == TICKS[0]:
                        _print_kinds(f"{path}, {state}, a tick for each message", found, case.names())
                totals.append([f"{path}, {state}", *sums])
    ticks = [f"with a tick for {size}" for size in TICKS]
    table("WAL bytes per message", ["path", "publish alone", *ticks], totals)


def _print_kinds(title: str, records: list[Record], names: dict[int, str]) -> None:
    sums: dict[tuple[str, str], tuple[int, int]] = {}
    for one in records:
        relations = ", ".join(names.get(node, str(node)) for node in one.nodes)
        count, size = sums.get((one.kind, relations), (0, 0))
        sums[one.kind, relations] = (count + 1, size + one.size)
    rows = [
        [kind, relations, f"{count / MESSAGES:.2f}", f"{size / MESSAGES:.1f}"]
        for (kind, relations), (count, size) in sorted(sums.items(), key=lambda item: -item[1][1])
        if size / MESSAGES >= _SHOWN_BYTES
    ]
    images = sum(one.size for one in records if one.has_images) / MESSAGES
    rows.append(["records with full page images", "", "", f"{images:.1f}"])
    table(title, ["record", "table or index", "records/message", "bytes/message"], rows)


if __name__ == "__main__":
    main()
