"""A producer process of the storm: `python -m …storm_producer '{"url": …, "count": …, "keys": …}'`.

Every local transaction takes the lock of its key, writes the next number of that key into `business`, sends the half
message, and commits or rolls back at random. One end message in a hundred is never sent.
"""

from __future__ import annotations

import json
import random
import sys

import psycopg

from outbox.broker.database.connection import BrokerDatabase
from outbox.broker.postgres import PostgresBroker
from outbox.message import Message
from outbox.transaction import CheckSettings, Decision, EndTransaction, HalfTransaction

GROUP = "storm"
CHECKS = CheckSettings(immunity_seconds=1, recheck_seconds=1.0, max_checks=1000)
LOCK = "SELECT pg_advisory_xact_lock(hashtextextended(%s, 0))"
NEXT = "INSERT INTO business SELECT %s, coalesce(max(n) + 1, 0), %s FROM business WHERE key = %s RETURNING n"


def main() -> None:
    options = json.loads(sys.argv[1])
    chance = random.Random(options["seed"])
    broker = PostgresBroker(BrokerDatabase(conninfo=options["url"]), check=CHECKS)
    with psycopg.connect(options["url"], autocommit=True) as connection:
        for _ in range(options["count"]):
            publish(connection, broker, f"k{chance.randrange(options['keys'])}", chance)
    broker.close()


def publish(
    connection: psycopg.Connection[tuple[int]], broker: PostgresBroker, key: str, chance: random.Random
) -> None:
    commits = chance.random() < 0.7
    with connection.transaction(force_rollback=not commits):
        connection.execute(LOCK, [key])
        probe = Message(topic="orders", key=key, body=b"")
        row = connection.execute(NEXT, [key, probe.message_id, key]).fetchone()
        assert row is not None
        message = Message(topic="orders", key=key, message_id=probe.message_id, body=json.dumps({"n": row[0]}).encode())
        half = HalfTransaction(producer_group=GROUP, messages=[message])
        broker.send_half(half, timeout_seconds=30)
    if chance.random() >= 0.01:
        decision = Decision.COMMIT if commits else Decision.ROLLBACK
        broker.end([EndTransaction(transaction_id=half.transaction_id, decision=decision, producer_group=GROUP)])


if __name__ == "__main__":
    main()
