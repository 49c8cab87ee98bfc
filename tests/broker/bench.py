"""A broker and what a consumption test needs around it: sequencer, consumers in threads or in processes."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from outbox.broker.consumer.runtime import ConsumerRuntime
from outbox.broker.database.connection import BrokerDatabase
from outbox.broker.database.executor import Executor
from outbox.broker.database.notify import Channel, notify
from outbox.broker.leading import Sequencer
from outbox.broker.operations.progress import list_queues
from outbox.broker.postgres import PostgresBroker
from outbox.message import Delivery, Message
from outbox.ports import AnyHandler, ConsumeCounts
from outbox.retry import RetryPolicy
from outbox.subscription import Subscription
from outbox.topic import MessageType, Topic
from tests.broker.support import process
from tests.support import eventually

ROOT = Path(__file__).resolve().parents[2]
AT_ONCE = RetryPolicy(delays_seconds=[0.0], max_attempts=3)
NORMAL = frozenset({MessageType.NORMAL, MessageType.DELAY, MessageType.TRANSACTION})
FIFO = frozenset({MessageType.FIFO, MessageType.TRANSACTION})

# The effects of handlers, in the order of their commits per key, and the inbox that makes each happen once.
TABLES = """
CREATE TABLE IF NOT EXISTS effect (
    position bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, instance text NOT NULL, queue text NOT NULL,
    key text NOT NULL, n integer NOT NULL, message_id uuid NOT NULL, attempt integer NOT NULL,
    began timestamptz NOT NULL DEFAULT clock_timestamp()
);
CREATE TABLE IF NOT EXISTS inbox (consumer_group text, generation integer, message_id uuid,
                    PRIMARY KEY (consumer_group, generation, message_id));
"""


def encode(body: Any) -> bytes:
    return json.dumps(body).encode()


def keyed(topic: str, count: int, keys: int, *, start: int = 0, tag: str = "") -> list[Message]:
    """Messages whose body is its number among those of its key."""
    return [
        Message(topic=topic, key=f"k{i % keys}", tag=tag, body=encode({"n": i // keys}))
        for i in range(start, start + count)
    ]


class Seen:
    """A handler that records its messages."""

    def __init__(self) -> None:
        self.ns: list[int] = []

    def __call__(self, delivery: Delivery) -> None:
        self.ns.append(delivery.body["n"])

    def take(self) -> list[int]:
        taken, self.ns = sorted(self.ns), []
        return taken


class ConsumptionBench:
    """One broker database; connections are closed by `close`, processes killed."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.database = BrokerDatabase(conninfo=url)
        self.broker = PostgresBroker(self.database)
        self.connection = self.database.connect()
        self.run = Executor(self.connection, "outbox")
        self.connection.execute(TABLES)
        self._sequencer = Sequencer(self.database, uuid.uuid4())
        self._sequencer_connection = self.database.connect()
        self._processes: list[subprocess.Popen[bytes]] = []

    def close(self) -> None:
        for child in self._processes:
            if child.poll() is None:
                child.send_signal(signal.SIGCONT)
                child.kill()
            child.wait()
        self.connection.close()
        self._sequencer_connection.close()
        self.broker.close()

    # -- publishing -----------------------------------------------------------------------------

    def declare(self, name: str, *, queues: int = 4, types: frozenset[MessageType] = NORMAL) -> None:
        self.broker.declare([Topic(name=name, queue_count=queues, types=types)])

    def publish(self, messages: Sequence[Message]) -> None:
        """Store and sequence."""
        for start in range(0, len(messages), 1000):
            self.broker.send(messages[start : start + 1000])
        self.sequence()

    def tick(self) -> int:
        """One tick; how many entries it has appended."""
        return self._sequencer.run_once(self._sequencer_connection).appended

    def sequence(self) -> None:
        while self.tick():
            pass
        notify(Executor(self._sequencer_connection, "outbox"), Channel.QUEUED)

    @contextlib.contextmanager
    def sequencing(self) -> Iterator[None]:
        """The broker process as a thread, for tests that run consumers meanwhile."""
        with process(self.database):
            yield

    # -- consuming in this process --------------------------------------------------------------

    def runtime(self, *subscriptions: tuple[Subscription, AnyHandler], **options: Any) -> ConsumerRuntime:
        return ConsumerRuntime(self.database, subscriptions, **options)

    def run_until_idle(self, subscription: Subscription, handler: AnyHandler, **options: Any) -> list[ConsumeCounts]:
        """Passes until nothing is left or one does nothing, sequencing what was sent back in between."""
        runtime = self.runtime((subscription, handler), **options)
        passes = []
        while any(vars(counts := runtime.run_once()).values()):
            passes.append(counts)
            self.sequence()
            if not counts.failed and not counts.timed_out and not self.lag(subscription.group):
                break
        return passes

    @contextlib.contextmanager
    def running(self, *subscriptions: tuple[Subscription, AnyHandler], **options: Any) -> Iterator[threading.Thread]:
        """A runtime in a thread, drained on the way out."""
        stop = threading.Event()
        options.setdefault("lease_seconds", 2.0)
        thread = threading.Thread(target=self.runtime(*subscriptions, **options).run, args=(stop,))
        thread.start()
        try:
            yield thread
        finally:
            stop.set()
            thread.join(30)
            assert not thread.is_alive(), "the runtime did not drain"

    # -- consuming in other processes -----------------------------------------------------------

    def spawn(self, name: str, *, faults: str = "", **options: Any) -> subprocess.Popen[bytes]:
        """A consumer process (consumer_process.py) that writes effects under `name`."""
        environment = {**os.environ, "OUTBOX_FAULTS": faults, "PYTHONPATH": str(ROOT)}
        argument = json.dumps({"url": self.url, "name": name, **options})
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.broker.consumer.consumer_process", argument], env=environment, cwd=ROOT
        )
        self._processes.append(process)
        return process

    def stop(self, process: subprocess.Popen[bytes]) -> int:
        process.terminate()
        return process.wait(20)

    # -- looking --------------------------------------------------------------------------------

    def rows(self, statement: str, *parameters: Any) -> list[tuple[Any, ...]]:
        return self.connection.execute(statement.encode(), parameters or None).fetchall()

    def effects(self) -> list[tuple[Any, ...]]:
        """(instance, key, n, message_id) in the order they were stored."""
        return self.rows("SELECT instance, key, n, message_id FROM effect ORDER BY position")

    def effect_count(self) -> int:
        return int(self.rows("SELECT count(*) FROM effect")[0][0])

    def members(self) -> int:
        return int(self.rows("SELECT count(*) FROM outbox.consumer WHERE expires_at > clock_timestamp()")[0][0])

    def owners(self) -> dict[int, uuid.UUID]:
        """Live owner by queue id of the topics' queues, without retry queues."""
        rows = self.rows(
            """
            SELECT queue_id, owner FROM outbox.queue_lease
            JOIN outbox.queue USING (queue_id) JOIN outbox.topic USING (topic_id)
            WHERE retry_of IS NULL AND owner IS NOT NULL AND expires_at > clock_timestamp()
            """
        )
        return dict(rows)

    def shares(self) -> list[int]:
        """How many queues each live owner has, fewest first."""
        owners = list(self.owners().values())
        return sorted(owners.count(owner) for owner in set(owners))

    def wait_for_shares(self, *shares: int) -> None:
        eventually(lambda: self.shares() == list(shares), what=f"shares {shares}")

    def lag(self, group: str) -> int:
        return sum(queue.lag for queue in list_queues(self.run, group))

    def retrying(self) -> int:
        return int(self.rows("SELECT count(*) FROM outbox.scheduled")[0][0])

    def assert_conserved(self, group: str) -> None:
        """Every stored position accounts for each entry before it, and nothing is left."""
        rows = self.rows(
            "SELECT next_offset - start_offset, handled + filtered + skipped + sent_back + dead + expired + moved"
            " FROM outbox.offset_v1 WHERE consumer_group = %s",
            group,
        )
        assert rows
        assert [total for total, _ in rows] == [counted for _, counted in rows]


def assert_each_once_in_order(effects: Sequence[tuple[Any, ...]], expected: int) -> None:
    """Every message took effect exactly once, and those of a key in the order they were published."""
    by_key: dict[str, list[int]] = {}
    for _, key, n, _ in effects:
        by_key.setdefault(key, []).append(n)
    wrong = {key: ns for key, ns in by_key.items() if ns != list(range(len(ns)))}
    assert not wrong, f"{len(wrong)} keys out of order or doubled, e.g. {next(iter(wrong.items()))}"
    assert len(effects) == expected


def gate() -> tuple[threading.Event, Callable[[Any], None]]:
    """An event and a handler that waits for it."""
    event = threading.Event()

    def wait(_: Any) -> None:
        assert event.wait(20)

    return event, wait
