"""A process that writes orders at random, as the framework does: half message, local transaction, end message, effect.

    python -m tests.spark.live_writer APP_URL BROKER_URL TOPIC_ID FIRST_NUMBER

It runs until it is killed; some transactions roll back, some end messages and some effects are never sent.
"""

from __future__ import annotations

import sys
import threading
import uuid
from datetime import UTC, datetime
from random import Random

import psycopg

from tests.spark.world import Order

PAUSE_SECONDS = 0.004
_HALF = (
    "INSERT INTO commit_log (born_at, transaction_id, message_id, topic_id, half, key, tag, content_type, body) "
    "VALUES (now(), %s, %s, %s, true, %s, '', 'application/json', %s) RETURNING log_id"
)
_END = "INSERT INTO op_log (transaction_id, decision, decided_by, log_ids) VALUES (%s, %s, 'P', %s)"
_ROW = (
    "INSERT INTO orders_order (id, customer, total, status, created_at, paid_at) VALUES (%s, %s, %s, 'paid', now(), %s)"
)


def main(app_url: str, broker_url: str, topic_id: str, first: str) -> None:
    """Write until killed."""
    random, pause, number = Random(int(first)), threading.Event(), int(first)
    with psycopg.connect(app_url) as app, psycopg.connect(broker_url, autocommit=True) as broker:
        broker.execute("SET search_path TO outbox")
        while not pause.wait(PAUSE_SECONDS):
            number += 1
            write_one(app, broker, int(topic_id), Order(number=number, at=datetime.now(UTC)), random)


def write_one(app: psycopg.Connection, broker: psycopg.Connection, topic_id: int, order: Order, random: Random) -> None:
    """One order, with any of the possible outcomes."""
    message_id = uuid.uuid4()
    values = [message_id, message_id, topic_id, str(order.number), order.body]
    stored = broker.execute(_HALF, values).fetchone()
    assert stored is not None
    app.execute(_ROW, [order.number, order.customer, order.total, order.at])
    commits, ends, handled = random.random() < 0.8, random.random() < 0.9, random.random() < 0.95
    if commits:
        app.commit()
    else:
        app.rollback()
    if ends:
        broker.execute(_END, [message_id, "C" if commits else "R", [stored[0]]])
        if commits and handled:
            app.execute("INSERT INTO logistics_shipment (order_id, created_at) VALUES (%s, now())", [order.number])
            app.commit()


if __name__ == "__main__":
    main(*sys.argv[1:])
