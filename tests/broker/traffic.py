"""Producers of both paths and handlers that write down what they do, to be compared when servers have died."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Self
from uuid import UUID

import psycopg

from outbox.broker.database.connection import BrokerDatabase
from outbox.broker.postgres import PostgresBroker
from outbox.errors import BrokerUnavailable
from outbox.message import Delivery, Message
from outbox.transaction import DecidedBy, Decision, EndTransaction, HalfTransaction
from tests.broker.inbox import InboxInvoker
from tests.support import eventually

EFFECT = "INSERT INTO effect (instance, queue, key, n, message_id, attempt) VALUES (%s, %s, %s, %s, %s, %s)"
LEDGER = UUID(int=1)


def end_of(half: HalfTransaction, by: DecidedBy = DecidedBy.PRODUCER) -> EndTransaction:
    """Its COMMIT."""
    return EndTransaction(
        transaction_id=half.transaction_id, decision=Decision.COMMIT, producer_group=half.producer_group, decided_by=by
    )


def includes(done: Callable[[], list[UUID]], wanted: list[UUID]) -> bool:
    """Whether all that is wanted is done."""
    return {*wanted} <= {*done()}


class Effects:
    """A handler that writes down what it does: in its inbox's transaction, or in memory."""

    def __init__(self, name: str, inbox: InboxInvoker | None, seen: list[str]) -> None:
        self._name = name
        self._inbox = inbox
        self._seen = seen
        self._memory: list[UUID] = []

    def __call__(self, delivery: Delivery) -> None:
        if self._inbox is not None:
            values = [self._name, delivery.queue, delivery.key, delivery.body["n"], delivery.message_id, 0]
            self._inbox.connection.execute(EFFECT, values)
        else:
            self._memory.append(delivery.message_id)
        self._seen.append(self._name)

    def done(self, url: str) -> list[UUID]:
        """The messages in the order in which they took effect."""
        if self._inbox is None:
            return list(self._memory)
        with psycopg.connect(url) as connection:
            rows = connection.execute(
                "SELECT message_id FROM effect WHERE instance = %s ORDER BY position", [self._name]
            ).fetchall()
        return [message_id for (message_id,) in rows]


class Traffic:
    """Producers of both paths that repeat what was not answered, as the real ones do; one local transaction each."""

    def __init__(self, database: BrokerDatabase) -> None:
        self._broker = PostgresBroker(database)
        self._stop = threading.Event()
        self._numbers = itertools.count()
        self.committed: list[Message] = []
        self.rolled_back: set[UUID] = set()
        self._pauses = {kind: threading.Lock() for kind in ("atomic", "half")}
        self._threads = [threading.Thread(target=self._run, args=(kind,)) for kind in self._pauses]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(timeout=60)
        self._broker.close()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """No transaction is under way that would make the next one wait for the disk."""
        with self._pauses["atomic"], self._pauses["half"]:
            yield

    def _run(self, kind: str) -> None:
        """Each thread has its own keys: the order of local commits is the order of its calls."""
        while not self._stop.is_set():
            with self._pauses[kind]:
                number = next(self._numbers)
                if kind == "half":
                    self.half(f"{kind}{number % 3}", commits=number % 5 != 0)
                    continue
                message = Message(topic="ordered", key=f"{kind}{number % 3}", body=b'{"n": %d}' % number)
                self.committed.append(message)
                self._repeat(partial(self._broker.send, [message], timeout_seconds=2))

    def half(self, key: str, *, commits: bool = True) -> UUID:
        """One local transaction with a half; its end is sent once, as a producer does."""
        message = Message(topic="ordered", key=key, body=b'{"n": 0}')
        half = HalfTransaction(producer_group="shop", messages=[message], ledger_id=LEDGER)
        self._repeat(partial(self._broker.send_half, half, timeout_seconds=2))
        if commits:
            self.committed.append(message)
        else:
            self.rolled_back.add(message.message_id)
        decision = Decision.COMMIT if commits else Decision.ROLLBACK
        with contextlib.suppress(BrokerUnavailable):
            self._broker.end([replace(end_of(half), decision=decision)], timeout_seconds=2)
        return message.message_id

    def _repeat(self, attempt: Callable[[], object]) -> None:
        # Also when it stops: every begun transaction is finished.
        while True:
            try:
                attempt()
                return
            except BrokerUnavailable:
                pass

    def check_back(self, connection: psycopg.Connection[tuple[object, ...]]) -> None:
        """Decide what no end has decided, by what the local transactions say."""
        rows = connection.execute(
            "SELECT message_id FROM outbox.commit_log WHERE half AND NOT EXISTS"
            " (SELECT FROM outbox.op_log WHERE op_log.transaction_id = commit_log.transaction_id)"
        ).fetchall()
        for (message_id,) in rows:
            decision = Decision.ROLLBACK if message_id in self.rolled_back else Decision.COMMIT
            self._broker.end(
                [
                    EndTransaction(
                        transaction_id=UUID(str(message_id)),
                        decision=decision,
                        producer_group="shop",
                        decided_by=DecidedBy.CHECK,
                    )
                ]
            )


def assert_took_effect(traffic: Traffic, groups: Mapping[str, Effects], urls: Mapping[str, str]) -> None:
    """In each group all that was committed and nothing else, each key in its order; where `urls` has an inbox, once."""
    wanted = [message.message_id for message in traffic.committed]
    for name, handler in groups.items():
        done = partial(handler.done, urls.get(name, ""))
        eventually(partial(includes, done, wanted), within_seconds=120, what=name)
        assert {*done()} == {*wanted}, name
        first = list(dict.fromkeys(done()))
        for key in {message.key for message in traffic.committed}:
            of_key = [one.message_id for one in traffic.committed if one.key == key]
            assert [one for one in first if one in {*of_key}] == of_key, (name, key)
        if name in urls:
            assert len(done()) == len(wanted)
