"""The broker's database is restored on the running server, while consumers and the sequencer live on."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path

import pytest

from outbox.broker.database.connection import BrokerDatabase
from outbox.broker.database.executor import Executor
from outbox.broker.groups import lives
from outbox.broker.log.topics import declare_topics
from outbox.broker.postgres import PostgresBroker
from outbox.message import Message
from outbox.subscription import Subscription
from outbox.topic import MessageType, Topic
from tests.broker.bench import AT_ONCE, Seen
from tests.broker.support import assert_gapless, new_sequencer, process
from tests.broker.test_server_crashes import consuming
from tests.restores import dump, recreate, reload_rows, restore_over
from tests.support import eventually

Restore = Callable[[str, Path], None]

TOPIC = Topic(name="orders", types=frozenset({MessageType.NORMAL}), queue_count=1)


@pytest.fixture
def database(new_database: Callable[..., str], broker_template: str) -> BrokerDatabase:
    """A broker in a database of its own, which the test may drop."""
    from psycopg.conninfo import conninfo_to_dict

    from outbox.broker import embedded
    from outbox.broker.schema.install import install

    url = new_database()
    assert conninfo_to_dict(url)["dbname"]
    database = BrokerDatabase(embedded.database_url(url, str(conninfo_to_dict(url)["dbname"])))
    with contextlib.closing(database.open()) as connection:
        install(connection)
        declare_topics(Executor(connection, "outbox"), [TOPIC])
    return database


def _send(broker: PostgresBroker, numbers: range) -> None:
    for n in numbers:
        broker.send([Message(topic="orders", body=b'{"n": %d}' % n)], timeout_seconds=60)


@pytest.mark.parametrize("leads", [False, True], ids=["process", "leading"])
@pytest.mark.parametrize(
    "restored",
    [restore_over, pytest.param(reload_rows, id="reload"), pytest.param(recreate, marks=pytest.mark.slow)],
)
def test_what_is_published_after_a_restore_is_handled(
    database: BrokerDatabase, restored: Restore, leads: bool, tmp_path: Path
) -> None:
    """A consumer that lives on is ahead of the dump; other messages get the offsets that it has passed."""
    seen = Seen()
    broker = PostgresBroker(database)
    subscription = Subscription(topic="orders", group="g", retry=AT_ONCE)
    sequencing = contextlib.nullcontext() if leads else process(database)
    with sequencing, consuming(database, subscription, seen, leads=leads):
        _send(broker, range(5))
        eventually(lambda: set(range(5)) <= set(seen.ns))
        file = dump(database.conninfo, tmp_path / "dump")
        _send(broker, range(5, 25))
        eventually(lambda: set(range(25)) <= set(seen.ns))
        restored(database.conninfo, file)
        broker.close()
        broker = PostgresBroker(database)
        _send(broker, range(100, 140))
        eventually(
            lambda: set(range(100, 140)) <= set(seen.ns),
            within_seconds=60,
            what=lambda: f"not handled: {sorted(set(range(100, 140)) - set(seen.ns))}",
        )
    broker.close()
    with contextlib.closing(database.open()) as connection:
        assert_gapless(connection)
        [(reason,)] = connection.execute(
            "SELECT reason FROM outbox.resync ORDER BY incarnation DESC LIMIT 1"
        ).fetchall()
        assert "a restore or a copy" in reason


@pytest.mark.parametrize("restored", [restore_over, reload_rows])
def test_a_restore_begins_a_life_and_refuses_the_next_tick(
    database: BrokerDatabase, restored: Restore, tmp_path: Path
) -> None:
    """Also if nothing happened since the dump, so that the newest tick is the same as before."""
    broker, sequencer = PostgresBroker(database), new_sequencer(database)
    with contextlib.closing(database.open()) as ticking:
        _send(broker, range(3))
        assert sequencer.run_once(ticking).appended == 3
        life = lives.current(Executor(ticking, "outbox"))
        restored(database.conninfo, dump(database.conninfo, tmp_path / "dump"))
        _send(broker, range(3, 5))
        assert sequencer.run_once(ticking).collided
        assert sequencer.run_once(ticking).appended == 2
        assert lives.current(Executor(ticking, "outbox")) != life
    broker.close()


def test_a_rewrite_of_the_tables_begins_no_life(database: BrokerDatabase) -> None:
    """VACUUM FULL, CLUSTER and FREEZE keep the marks that distinguish a life from its copy."""
    with contextlib.closing(database.open()) as connection:
        life = lives.current(Executor(connection, "outbox"))
        connection.execute("VACUUM (FULL, FREEZE) outbox.life")
        connection.execute("CLUSTER outbox.life USING life_pkey")
        connection.execute("VACUUM (FULL, FREEZE) outbox.life_sign")
        connection.execute("VACUUM (FREEZE) outbox.life, outbox.life_sign")
        assert lives.current(Executor(connection, "outbox")) == life


def test_consumers_register_again_after_a_restore_to_before_their_group(
    database: BrokerDatabase, tmp_path: Path
) -> None:
    """Another group may have its id now."""
    file = dump(database.conninfo, tmp_path / "dump")
    late, other = Seen(), Seen()
    broker = PostgresBroker(database)
    with process(database), consuming(database, Subscription(topic="orders", group="late"), late):
        _send(broker, range(2))
        eventually(lambda: set(range(2)) <= set(late.ns))
        restore_over(database.conninfo, file)
        with consuming(database, Subscription(topic="orders", group="other"), other):
            _send(broker, range(10, 30))
            eventually(lambda: set(range(10, 30)) <= set(late.ns), within_seconds=60)
            eventually(lambda: set(range(10, 30)) <= set(other.ns), within_seconds=60)
    broker.close()
