"""One process of a running system, for whichever version of the package is on its path: role and URL as arguments.

Runs until SIGTERM, then finishes what it holds.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence

import psycopg
from psycopg.errors import UniqueViolation

from outbox.broker import process
from outbox.broker.consumer.runtime import ConsumerRuntime
from outbox.broker.database.connection import BrokerDatabase
from outbox.broker.database.executor import Executor
from outbox.broker.leading import LeaderSettings
from outbox.broker.log import commit_log, topics
from outbox.broker.postgres import PostgresBroker
from outbox.broker.schema.install import install
from outbox.checkback import CheckBack
from outbox.message import Delivery, Message
from outbox.retry import RetryPolicy
from outbox.subscription import Subscription
from outbox.topic import MessageType, Topic
from outbox.transaction import Answer, Check, CheckSettings, Decision, EndTransaction, HalfTransaction

GROUP = "shop"
TOPIC = Topic(
    name="versions", types=frozenset({MessageType.NORMAL, MessageType.DELAY, MessageType.TRANSACTION}), queue_count=4
)
CHECKS = CheckSettings(immunity_seconds=1, recheck_seconds=1)
# The application: its orders, its ledger, and what the handlers did.
TABLES = """
CREATE TABLE IF NOT EXISTS business (message_id uuid PRIMARY KEY, path text NOT NULL);
CREATE TABLE IF NOT EXISTS ledger (transaction_id uuid PRIMARY KEY, state text NOT NULL);
CREATE TABLE IF NOT EXISTS effect (message_id uuid PRIMARY KEY);
"""


def setup(database: BrokerDatabase, stop: threading.Event) -> None:
    """Install the tables of this version, and the application's."""
    with psycopg.connect(database.conninfo, autocommit=True) as connection:
        install(connection, database.schema)
        topics.declare_topics(Executor(connection, database.schema), [TOPIC])
        connection.execute(TABLES)


def upgrade(database: BrokerDatabase, stop: threading.Event) -> None:
    """Install or upgrade the tables, and nothing else."""
    with psycopg.connect(database.conninfo, autocommit=True) as connection:
        install(connection, database.schema)


def produce(database: BrokerDatabase, stop: threading.Event) -> None:
    """Publish on both paths in turn; every fifth transaction rolls back, every third end message is lost."""
    broker = PostgresBroker(database, check=CHECKS)
    catalog = topics.TopicCatalog(database.schema)
    with psycopg.connect(database.conninfo) as connection:
        for number in itertools.count():
            if stop.wait(0.005):
                break
            message = Message(topic=TOPIC.name, key=f"k{number % 7}", body=json.dumps({"n": number}).encode())
            commit = number % 5 != 0
            if number % 2:
                _publish_atomic(connection, database.schema, catalog, message, commit=commit)
                broker.notify_decided()
            else:
                _publish_two_phase(connection, broker, message, commit=commit, end=number % 3 != 0)
    broker.close()


def _publish_atomic(
    connection: psycopg.Connection[tuple[object, ...]],
    schema: str,
    catalog: topics.TopicCatalog,
    message: Message,
    *,
    commit: bool,
) -> None:
    commit_log.append_decided(Executor(connection, schema), catalog, [message])
    connection.execute("INSERT INTO business VALUES (%s, 'atomic')", [message.message_id])
    connection.commit() if commit else connection.rollback()


def _publish_two_phase(
    connection: psycopg.Connection[tuple[object, ...]],
    broker: PostgresBroker,
    message: Message,
    *,
    commit: bool,
    end: bool,
) -> None:
    connection.execute("INSERT INTO ledger VALUES (%s, 'C')", [message.message_id])
    broker.send_half(HalfTransaction(producer_group=GROUP, messages=(message,)))
    connection.execute("INSERT INTO business VALUES (%s, 'two-phase')", [message.message_id])
    connection.commit() if commit else connection.rollback()
    if end:
        decision = Decision.COMMIT if commit else Decision.ROLLBACK
        broker.end([EndTransaction(transaction_id=message.message_id, decision=decision, producer_group=GROUP)])


class _LedgerChecker:
    """The ledger with its barrier."""

    def __init__(self, url: str) -> None:
        self._url = url

    def check_local_transactions(self, checks: Sequence[Check]) -> Iterator[Answer]:
        """See ports.Checker."""
        with psycopg.connect(self._url, autocommit=True) as connection:
            for check in checks:
                yield Answer(transaction_id=check.transaction_id, decision=_decide(connection, check))


def _decide(connection: psycopg.Connection[tuple[object, ...]], check: Check) -> Decision:
    if check.may_write:
        with contextlib.suppress(UniqueViolation):
            connection.execute("INSERT INTO ledger VALUES (%s, 'R')", [check.transaction_id])
    row = connection.execute("SELECT state FROM ledger WHERE transaction_id = %s", [check.transaction_id]).fetchone()
    if row is None:
        return Decision.UNKNOWN
    return Decision.COMMIT if row[0] == "C" else Decision.ROLLBACK


def check(database: BrokerDatabase, stop: threading.Event) -> None:
    """Answer for the group."""
    broker = PostgresBroker(database, check=CHECKS)
    while not stop.wait(0.2):
        CheckBack(broker, GROUP, _LedgerChecker(database.conninfo)).run_once()
    broker.close()


def consume(database: BrokerDatabase, stop: threading.Event) -> None:
    """Store one effect per message, once. Every eleventh fails at first and comes back from the retry queue."""

    def handle(delivery: Delivery) -> None:
        if delivery.attempt == 1 and delivery.body["n"] % 11 == 0:
            raise ValueError("the first attempt of an eleventh")
        with psycopg.connect(database.conninfo, autocommit=True) as connection:
            connection.execute("INSERT INTO effect VALUES (%s) ON CONFLICT DO NOTHING", [delivery.message_id])

    subscription = Subscription(topic=TOPIC.name, group="readers", retry=RetryPolicy(delays_seconds=[0.5]))
    ConsumerRuntime(database, [(subscription, handle)], lease_seconds=3.0).run(stop)


def sequence(database: BrokerDatabase, stop: threading.Event) -> None:
    """Be a broker process."""
    process.run_broker(database, stop, settings=LeaderSettings(maintenance_seconds=0.5, check=CHECKS))


ROLES: dict[str, Callable[[BrokerDatabase, threading.Event], None]] = {
    "setup": setup,
    "upgrade": upgrade,
    "produce": produce,
    "check": check,
    "consume": consume,
    "sequence": sequence,
}


def main() -> None:
    """Say which code runs, then run the role."""
    import outbox

    logging.basicConfig(level=logging.WARNING)
    # Handlers fail on purpose; everything else that is logged with a traceback is a fault.
    logging.getLogger("outbox.broker.consumer.results").setLevel(logging.CRITICAL)
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    print(outbox.__file__, flush=True)
    ROLES[sys.argv[1]](BrokerDatabase(sys.argv[2]), stop)


if __name__ == "__main__":
    main()
