"""`celery worker --outbox`: real workers, real children, real signals."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from uuid import UUID

import psycopg
import pytest

from outbox.broker.database.connection import BrokerDatabase
from outbox.broker.postgres import PostgresBroker
from outbox.message import Message
from outbox.topic import Topic
from outbox.transaction import HalfTransaction
from tests.celery.transport import create_queue
from tests.support import eventually

ROOT = Path(__file__).resolve().parents[2]
LEASE_SECONDS = 5.0


class Worker:
    """A Celery worker process and what it did to the database."""

    def __init__(self, url: str, log: Path, *options: str) -> None:
        environment = {**os.environ, "OUTBOX_BROKER_URL": url, "PYTHONPATH": str(ROOT)}
        environment["OUTBOX_TEST_LEASE_SECONDS"] = str(LEASE_SECONDS)
        command = [sys.executable, "-m", "celery", "-A", "tests.celery.app", "worker", "-B", "--concurrency=1"]
        command += ["--without-gossip", "--without-mingle", "--loglevel=INFO", f"--schedule={log.with_suffix('.beat')}"]
        self.log = log
        with log.open("w") as output:
            self.process = subprocess.Popen(
                [*command, *options],
                cwd=ROOT,
                env=environment,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def children(self) -> dict[str, int]:
        """Name and pid of the supervised children that are alive."""
        found = {}
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                command = (entry / "cmdline").read_bytes().decode().split("\0")
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                if parent == self.process.pid and "-m" in command:
                    found[command[command.index("-m") + 1]] = int(entry.name)
        return {name: pid for name, pid in found.items() if name in ("outbox.broker", "tests.celery.consumer_child")}

    def kill(self) -> None:
        """Kill the whole tree: supervised children lead sessions of their own, pool and beat are in the worker's."""
        for pid in self.children().values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


@pytest.fixture
def url(broker_url: str) -> str:
    with psycopg.connect(broker_url, autocommit=True) as connection:
        connection.execute("CREATE TABLE started (message_id uuid)")
        connection.execute("CREATE TABLE handled (message_id uuid, pid integer)")
    create_queue(broker_url, "celery")
    return broker_url


@pytest.fixture
def broker(url: str) -> Iterator[PostgresBroker]:
    broker = PostgresBroker(BrokerDatabase(conninfo=url))
    broker.declare([Topic(name="orders")])
    yield broker
    broker.close()


@pytest.fixture
def start(url: str, tmp_path: Path) -> Iterator[Callable[..., Worker]]:
    workers: list[Worker] = []

    def start(*options: str) -> Worker:
        workers.append(Worker(url, tmp_path / f"worker-{len(workers)}.log", *options))
        return workers[-1]

    yield start
    for worker in workers:
        worker.kill()


def message(**headers: str) -> Message:
    return Message(topic="orders", body=b"{}", headers=headers)


def handled(url: str, table: str = "handled") -> set[UUID]:
    with psycopg.connect(url) as connection:
        return {row[0] for row in connection.execute(f"SELECT message_id FROM {table}")}


def dead_letters(url: str) -> set[UUID]:
    with psycopg.connect(url) as connection:
        return {row[0] for row in connection.execute("SELECT message_id FROM outbox.dead_letter_v1")}


def gone(pid: int) -> bool:
    try:
        return (Path("/proc") / str(pid) / "stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def both_children(worker: Worker) -> dict[str, int]:
    return eventually(lambda: worker.children() if len(worker.children()) == 2 else {}, what=worker.log.read_text)


def ready(worker: Worker) -> None:
    eventually(lambda: "ready." in worker.log.read_text(), within_seconds=40, what=worker.log.read_text)


@pytest.mark.slow
def test_check_back_runs_through_beat_alone(url: str, broker: PostgresBroker, start: Callable[..., Worker]) -> None:
    half = HalfTransaction(producer_group="shop", messages=[message()], immunity_seconds=0)
    broker.send_half(half)
    worker = start("--outbox")
    eventually(lambda: handled(url) == {half.transaction_id}, within_seconds=40, what=worker.log.read_text)


def test_killed_children_are_restarted_and_continue(
    url: str, broker: PostgresBroker, start: Callable[..., Worker]
) -> None:
    worker = start("--outbox")
    first = both_children(worker)
    for pid in first.values():
        os.kill(pid, signal.SIGKILL)
    second = eventually(
        lambda: both_children(worker) if not set(worker.children().values()) & set(first.values()) else {}
    )
    assert set(second) == set(first)
    sent = broker.send([message() for _ in range(20)])
    eventually(lambda: handled(url) == {receipt.message_id for receipt in sent}, within_seconds=40)


def test_killed_worker_takes_its_children_with_it(broker: PostgresBroker, start: Callable[..., Worker]) -> None:
    worker = start("--outbox")
    children = both_children(worker)
    os.kill(worker.process.pid, signal.SIGKILL)
    worker.process.wait()
    for name, pid in children.items():
        eventually(lambda pid=pid: gone(pid), what=f"{name} outlives its worker")  # type: ignore[misc]


def test_sigterm_drains(url: str, broker: PostgresBroker, start: Callable[..., Worker]) -> None:
    worker = start("--outbox")
    children = both_children(worker)
    (slow,) = broker.send([message(seconds="0.7")])
    eventually(lambda: handled(url, "started") == {slow.message_id}, within_seconds=40)
    worker.process.terminate()
    assert worker.process.wait(40) == 0, worker.log.read_text()
    assert all(gone(pid) for pid in children.values())
    assert handled(url) == {slow.message_id}
    with psycopg.connect(url) as connection:
        offsets = connection.execute("SELECT sum(handled) FROM outbox.offset_v1").fetchone()
        leases = connection.execute("SELECT count(*) FROM outbox.queue_lease WHERE owner IS NOT NULL").fetchone()
    assert (offsets, leases) == ((1,), (0,))


@pytest.mark.slow
@pytest.mark.parametrize("second", [pytest.param("QUIT", marks=pytest.mark.soak), "INT"])
def test_a_second_signal_ends_the_drain(
    url: str, broker: PostgresBroker, start: Callable[..., Worker], monkeypatch: pytest.MonkeyPatch, second: str
) -> None:
    """The handler runs for longer than this test may, and so may the drain."""
    monkeypatch.setenv("OUTBOX_TEST_DRAIN_SECONDS", "600")
    worker = start("--outbox")
    children = both_children(worker)
    ready(worker)
    (slow,) = broker.send([message(seconds="600")])
    eventually(lambda: handled(url, "started") == {slow.message_id}, within_seconds=40, what=worker.log.read_text)
    worker.process.send_signal(signal.SIGINT)
    eventually(lambda: "draining children" in worker.log.read_text(), within_seconds=40, what=worker.log.read_text)
    worker.process.send_signal(signal.Signals[f"SIG{second}"])
    worker.process.wait(60)
    assert all(gone(pid) for pid in children.values())
    assert "did not end" not in worker.log.read_text()
    assert handled(url) == set()


@pytest.mark.slow
def test_roles_choose_the_children(start: Callable[..., Worker]) -> None:
    wrong = start("--outbox-roles=brocker")
    assert wrong.process.wait(40) == 2
    assert "there is no role brocker; choose from broker, consumer" in wrong.log.read_text()
    worker = start("--outbox-roles=broker")
    ready(worker)
    eventually(lambda: set(worker.children()) == {"outbox.broker"}, what=worker.log.read_text)
    assert "child consumer" not in worker.log.read_text()


@pytest.mark.slow
def test_without_the_option_a_worker_starts_no_children(start: Callable[..., Worker]) -> None:
    worker = start()
    ready(worker)
    assert worker.children() == {}


def inner_state(url: str, *workers: Worker) -> str:
    """What the processes and the database are doing: for the message of a test whose wait times out."""
    for worker in workers:
        if (pid := worker.children().get("tests.celery.consumer_child")) is not None:
            os.kill(pid, signal.SIGUSR1)
    tables = ("outbox.consumer", "outbox.queue_lease", "outbox.offset_v1", "pg_stat_activity")
    with psycopg.connect(url, autocommit=True) as connection:
        rows = [str(row[0]) for table in tables for row in connection.execute(f"SELECT row_to_json(t) FROM {table} t")]
    return "\n".join([*rows, *(worker.log.read_text() for worker in workers)])


class OwnerWatch:
    """Watches how long queues of the group are without a live owner, by the database's clock."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._stop = threading.Event()
        self.longest: dict[int, float] = {}
        self._thread = threading.Thread(target=self._watch)

    def __enter__(self) -> OwnerWatch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        with psycopg.connect(self._url, autocommit=True) as connection:
            while not self._stop.wait(0.05):
                rows = connection.execute(
                    "SELECT queue_id, extract(epoch FROM clock_timestamp() - expires_at)::float FROM outbox.queue_lease"
                    " WHERE owner IS NULL OR expires_at < clock_timestamp()"
                )
                for queue_id, seconds in rows:
                    self.longest[queue_id] = max(self.longest.get(queue_id, 0.0), seconds)


@pytest.mark.slow
def test_two_workers_under_rebalance_one_process_tree_killed(
    url: str, broker: PostgresBroker, start: Callable[..., Worker]
) -> None:
    """No queue is without an owner for longer than a lease term, and no effect happens twice."""
    first, second = start("--outbox"), start("--outbox")
    owners = "SELECT count(DISTINCT owner) FROM outbox.queue_lease WHERE expires_at > clock_timestamp()"
    owner_by_queue = "SELECT queue_id, owner FROM outbox.queue_lease ORDER BY 1"
    both_children(first)
    both_children(second)

    def state() -> str:
        return inner_state(url, first, second)

    with psycopg.connect(url, autocommit=True) as connection:
        eventually(lambda: connection.execute(owners).fetchone() == (2,), within_seconds=40, what=state)
        sent = broker.send([message(seconds="0.02") for _ in range(300)])
        eventually(lambda: len(handled(url)) > 50, within_seconds=40, what=state)
        shares = connection.execute(owner_by_queue).fetchall()
        with OwnerWatch(url) as watch:
            assert first.process.poll() is None, first.log.read_text()
            first.kill()
            sent += broker.send([message(seconds="0.02") for _ in range(100)])
            eventually(lambda: handled(url) == {receipt.message_id for receipt in sent}, within_seconds=60, what=state)
            eventually(lambda: connection.execute(owners).fetchone() == (1,), within_seconds=40, what=state)
        heirs = connection.execute(owner_by_queue).fetchall()
        rows = connection.execute("SELECT count(*), count(DISTINCT message_id) FROM handled").fetchone()
    assert rows == (400, 400)
    assert heirs != shares, "no queue changed its owner: nothing was killed"
    assert max(watch.longest.values(), default=0.0) <= LEASE_SECONDS
