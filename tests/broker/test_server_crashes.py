"""The server crashes and comes back while consumers, the sequencer and handlers live on.

`wal_writer_delay` at its longest: a commit that did not wait for the disk is certainly lost, unless another one waited.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import psycopg
import pytest
from psycopg.conninfo import make_conninfo

from outbox.broker import embedded
from outbox.broker.consumer.runtime import ConsumerRuntime
from outbox.broker.database.connection import BrokerDatabase
from outbox.broker.database.executor import Executor
from outbox.broker.leading import LeadingConsumer
from outbox.broker.log.topics import declare_topics
from outbox.broker.postgres import PostgresBroker
from outbox.broker.schema.install import install
from outbox.errors import BrokerUnavailable
from outbox.message import Delivery, Message
from outbox.ports import Invoker, call_handler
from outbox.subscription import Mode, Subscription
from outbox.topic import MessageType, Topic
from outbox.transaction import DecidedBy, HalfTransaction
from tests.broker.bench import AT_ONCE, TABLES, Seen
from tests.broker.inbox import InboxInvoker
from tests.broker.support import assert_gapless, process
from tests.broker.traffic import LEDGER, Effects, Traffic, assert_took_effect, end_of, includes
from tests.servers import private_postgres
from tests.support import eventually

TOPICS = (
    Topic(name="orders", types=frozenset({MessageType.NORMAL, MessageType.TRANSACTION}), queue_count=1),
    Topic(name="ordered", types=frozenset({MessageType.FIFO, MessageType.TRANSACTION}), queue_count=2),
)
SETTINGS = {"wal_writer_delay": "10s", "autovacuum": "off", "max_connections": "60"}


class Server:
    """A server of the test's own with a broker."""

    def __init__(self, data: Path, url: str) -> None:
        self.data = data
        self.database = BrokerDatabase(url)
        with contextlib.closing(self.database.open()) as connection:
            install(connection)
            declare_topics(Executor(connection, "outbox"), TOPICS)

    def crash(self) -> None:
        """End it at once: writes that are not on the disk are lost."""
        os.kill(embedded.postmaster_pid(self.data), signal.SIGQUIT)
        eventually(lambda: not _answers(self.database.conninfo))

    def start(self) -> None:
        embedded.start(self.data, settings=SETTINGS)

    def kill_a_backend(self) -> None:
        """The server discards its memory and continues, under the same postmaster."""
        with contextlib.closing(self.database.open()) as connection:
            os.kill(connection.info.backend_pid, signal.SIGKILL)

    def heads(self) -> dict[int, int]:
        """The next offsets of all queues that have any."""
        with contextlib.closing(self.database.open()) as connection:
            rows = connection.execute("SELECT queue_id, head FROM outbox.queue_head WHERE head > 0").fetchall()
            return dict(rows)

    def lives(self) -> list[dict[int, int]]:
        """The heads that each life began with; none while it does not answer."""
        try:
            with contextlib.closing(self.database.open()) as connection:
                rows = connection.execute("SELECT queue_ids, heads FROM outbox.life ORDER BY ordinal").fetchall()
                return [dict(zip(queue_ids, heads, strict=True)) for queue_ids, heads in rows]
        except (psycopg.Error, BrokerUnavailable):
            return []

    def end(self, how: str) -> bool:
        """Crash it and wait for its next life; whether entries were lost."""
        heads, before = self.heads(), len(self.lives())
        if how == "server":
            self.crash()
            self.start()
        else:
            self.kill_a_backend()
        eventually(lambda: len(self.lives()) > before, within_seconds=60)
        return self.lives()[-1] != heads


@pytest.fixture
def server() -> Iterator[Server]:
    with private_postgres(**SETTINGS) as (data, url):
        yield Server(data, url)


def _answers(url: str) -> bool:
    try:
        psycopg.connect(url, connect_timeout=2).close()
    except psycopg.OperationalError:
        return False
    return True


@contextlib.contextmanager
def consuming(
    database: BrokerDatabase,
    subscription: Subscription,
    handler: Callable[[Delivery], object],
    invoker: Invoker = call_handler,
    *,
    leads: bool = False,
) -> Iterator[None]:
    """A consumer in a thread, which also sequences if it `leads`; its leases outlast a restart of the server."""
    stop = threading.Event()
    session_task = LeadingConsumer(database) if leads else None
    runtime = ConsumerRuntime(
        database, [(subscription, handler)], invoker=invoker, lease_seconds=30.0, session_task=session_task
    )
    thread = threading.Thread(target=runtime.run, args=(stop,))
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(timeout=60)
        assert not thread.is_alive()


@pytest.mark.parametrize(
    ("broadcast", "leads", "ends"),
    [
        (False, False, "server"),
        *(
            pytest.param(*one, marks=pytest.mark.slow)
            for one in (
                (False, True, "backend"),
                (False, False, "backend"),
                (True, False, "server"),
                (True, False, "backend"),
                (False, True, "server"),
            )
        ),
    ],
)
def test_what_takes_the_offset_of_a_lost_entry_is_handled(
    server: Server, ends: str, broadcast: bool, leads: bool
) -> None:
    """A consumer that lives on has handled an entry which the server does not know any more."""
    seen = Seen()
    broker = PostgresBroker(server.database)
    subscription = Subscription(topic="orders", group="g", broadcast=broadcast, retry=AT_ONCE)
    sequencing = contextlib.nullcontext() if leads else process(server.database)
    with sequencing, consuming(server.database, subscription, seen, leads=leads):
        eventually(lambda: broker.send([_message(0)]) and 0 in seen.ns)
        sent = 0
        lost = False
        while not lost:
            # Neither the end nor the tick waits for the disk.
            sent += 1
            unsure = HalfTransaction(producer_group="shop", messages=[_message(sent)], ledger_id=LEDGER)
            broker.send_half(unsure, timeout_seconds=30)
            broker.end([end_of(unsure)], timeout_seconds=30)
            eventually(partial(_has, seen, sent))
            # Not if something else has waited for the disk meanwhile.
            lost = server.end(ends)
        broker.send([_message(sent + 1)], timeout_seconds=30)
        eventually(lambda: sent + 1 in seen.ns, within_seconds=60)
        # As check-back does.
        broker.end([end_of(unsure, DecidedBy.CHECK)], timeout_seconds=30)
        eventually(lambda: seen.ns.count(sent) == 2)
    broker.close()


def _has(seen: Seen, n: int) -> bool:
    return n in seen.ns


def _message(n: int) -> Message:
    return Message(topic="orders", body=b'{"n": %d}' % n, key="k")


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("rounds", [3, pytest.param(20, marks=pytest.mark.soak)])
@pytest.mark.parametrize("leads", [pytest.param("", marks=pytest.mark.slow), "bare"])
def test_crashes_under_traffic_lose_and_invent_nothing(
    server: Server, new_database: Callable[..., str], rounds: int, leads: str
) -> None:
    """On both paths, for groups without and with an inbox, in the broker's database and in another one, and broadcast.

    In each group every message is handled, none that was rolled back; with an inbox once; each key in its order.
    """
    elsewhere = new_database()
    for url in (server.database.conninfo, elsewhere):
        with psycopg.connect(url, autocommit=True) as connection:
            connection.execute(TABLES)
    urls = {"here": server.database.conninfo, "elsewhere": elsewhere}
    # Effects do not wait for the disk either: that would take the tick there with them.
    relaxed = {name: make_conninfo(url, options="-csynchronous_commit=off") for name, url in urls.items()}
    inboxes = {name: InboxInvoker(url, idle_seconds=0) for name, url in relaxed.items()}
    seen: list[str] = []
    groups = {name: Effects(name, inboxes.get(name), seen) for name in ("bare", "here", "elsewhere", "all")}
    with contextlib.ExitStack() as stack:
        if not leads:
            stack.enter_context(process(server.database))
        for name, handler in groups.items():
            subscription = Subscription(
                topic="ordered", group=name, broadcast=name == "all", mode=Mode.KEY_ORDERED, suspend_seconds=0.05
            )
            invoker = inboxes.get(name, call_handler)
            stack.enter_context(consuming(server.database, subscription, handler, invoker, leads=name == leads))
        lost = 0
        with Traffic(server.database) as traffic:
            for number in range(rounds):
                reached = len(seen) + 200
                eventually(partial(lambda least: len(seen) >= least, reached), within_seconds=120)
                with traffic.paused():
                    last = traffic.half(f"last{number}")
                    eventually(partial(includes, partial(groups["bare"].done, ""), [last]))
                    lost += server.end("backend" if number % 3 == 2 else "server")
        assert lost, "no round lost anything: nothing was tested"
        with contextlib.closing(server.database.open()) as connection:
            traffic.check_back(connection)
        assert_took_effect(traffic, groups, urls)
        with contextlib.closing(server.database.open()) as connection:
            assert_gapless(connection)
    for inbox in inboxes.values():
        inbox.close()
