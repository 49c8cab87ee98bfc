"""A harness that judges any sequencer: concurrent writers with savepoints, aborts and held-open transactions."""

from __future__ import annotations

import contextlib
import random
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from uuid import UUID

import psycopg
from psycopg.rows import TupleRow

from outbox.broker.database.connection import BrokerDatabase
from outbox.broker.database.executor import Executor
from outbox.broker.log import commit_log
from outbox.broker.log.topics import TopicCatalog
from outbox.message import Message
from tests.broker.support import in_threads, message, queued

# A sequencer under judgement: one pass on its connection; True when it found something.
Pass = Callable[[psycopg.Connection[TupleRow]], bool]


@dataclass
class Verdict:
    """The faults that were found; all empty and False for a right sequencer."""

    lost: set[UUID] = field(default_factory=set)
    doubled: set[UUID] = field(default_factory=set)
    invented: set[UUID] = field(default_factory=set)
    gaps: bool = False
    stalled: bool = False

    @property
    def is_clean(self) -> bool:
        """Whether nothing went wrong."""
        return not (self.lost or self.doubled or self.invented or self.gaps or self.stalled)


def judge(
    database: BrokerDatabase, leaders: Sequence[Pass], *, writers: int = 8, transactions: int = 25, seed: int = 1
) -> Verdict:
    """Run writers and leaders at once, then compare what was committed with what was queued."""
    committed: set[UUID] = set()
    writing = threading.Event()
    writing.set()
    lock = threading.Lock()
    verdict = Verdict()

    def write(number: int) -> None:
        mine = _write(database, random.Random(seed * 1000 + number), transactions)
        with lock:
            committed.update(mine)

    def lead(run_once: Pass) -> None:
        with contextlib.closing(database.connect()) as connection:
            while writing.is_set():
                run_once(connection)

    def write_all() -> None:
        in_threads([partial(write, number) for number in range(writers)])

    def hold_open_then_stop() -> None:
        try:
            held, verdict.stalled = _hold_open(database, write_all, committed)
            committed.update(held)
        finally:
            writing.clear()

    in_threads([hold_open_then_stop, *[partial(lead, one) for one in leaders]])
    with contextlib.closing(database.connect()) as connection:
        for run_once in leaders:
            while run_once(connection):
                pass
        entries = queued(connection)
    counts = Counter(entry.message_id for entry in entries)
    verdict.lost = committed - set(counts)
    verdict.invented = set(counts) - committed
    verdict.doubled = {message_id for message_id, count in counts.items() if count > 1}
    offsets: dict[int, list[int]] = {}
    for entry in entries:
        offsets.setdefault(entry.queue_id, []).append(entry.offset)
    verdict.gaps = any(found != list(range(len(found))) for found in offsets.values())
    return verdict


def _write(database: BrokerDatabase, rng: random.Random, transactions: int) -> set[UUID]:
    """One writer's transactions; the ids that it committed."""
    catalog = TopicCatalog(database.schema)
    committed: set[UUID] = set()
    pause = threading.Event()
    with contextlib.closing(database.connect()) as connection:
        for _ in range(transactions):
            kept: list[Message] = []
            abort = rng.random() < 0.2
            with contextlib.suppress(_Abort), connection.transaction():
                kept += _append(connection, catalog, rng)
                with contextlib.suppress(_Abort), connection.transaction():
                    inner = _append(connection, catalog, rng)
                    if rng.random() < 0.5:
                        raise _Abort
                    kept += inner
                if rng.random() < 0.3:
                    pause.wait(rng.random() * 0.01)
                if abort:
                    raise _Abort
            if not abort:
                committed.update(one.message_id for one in kept)
    return committed


def _append(connection: psycopg.Connection[TupleRow], catalog: TopicCatalog, rng: random.Random) -> list[Message]:
    messages = [message(key=rng.choice(("", "a", "b", "c"))) for _ in range(rng.randint(1, 3))]
    commit_log.append_decided(Executor(connection, "outbox"), catalog, messages)
    return messages


def _hold_open(database: BrokerDatabase, work: Callable[[], object], committed: set[UUID]) -> tuple[set[UUID], bool]:
    """Do the work while a transaction that has published is open; returns its ids, and whether others waited."""
    pause = threading.Event()
    with contextlib.closing(database.connect()) as held, contextlib.closing(database.connect()) as observer:
        held.execute("BEGIN")
        mine = [message()]
        commit_log.append_decided(Executor(held, "outbox"), TopicCatalog(database.schema), mine)
        work()
        stalled = True
        # A right sequencer needs moments, on however busy a machine; a stalled one would need the transaction's end.
        for _ in range(1000):
            if committed <= {entry.message_id for entry in queued(observer)}:
                stalled = False
                break
            pause.wait(0.02)
        held.execute("COMMIT")
    return {one.message_id for one in mine}, stalled


class _Abort(Exception):
    pass
