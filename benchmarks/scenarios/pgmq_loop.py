"""The adapter of pgmq: `pgmq.send` in the transaction. It has no worker, so this is a loop: read, handle, delete.

The SQL of pgmq comes with its Python client, without its extension.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable

import psycopg
from psycopg.types.json import Jsonb

from benchmarks.scenarios.contract import EFFECT, ORDER, TAKEOVER_SECONDS, System, handler_works, main, number

_READ = """
SELECT msg_id, message FROM pgmq.read_with_poll('orders', vt => %s, qty => 10, max_poll_seconds => 5,
                                                poll_interval_ms => 10)
"""


def prepare() -> None:
    from pgmq.install import get_embedded_install_sql

    with _connect() as connection:
        connection.execute("CREATE SCHEMA IF NOT EXISTS pgmq")
        connection.execute(get_embedded_install_sql().encode())
        connection.execute("SELECT pgmq.create('orders')")


def blocks() -> Callable[[str], None]:
    connection = _connect()

    def block(padding: str) -> None:
        nonlocal connection
        if connection.closed:
            connection = _connect()
        with connection.transaction():
            (order,) = connection.execute(ORDER).fetchall()[0]
            connection.execute("SELECT pgmq.send('orders', %s)", [Jsonb({"order": order, "padding": padding})])

    return block


def work() -> None:
    """As many loops as WORKER_COUNT says, each with a connection of its own."""
    for _ in range(int(number("WORKER_COUNT", 32)) - 1):
        threading.Thread(target=_loop, daemon=True).start()
    _loop()


def _loop() -> None:
    while True:
        try:
            with _connect() as connection:
                while True:
                    for message, body in connection.execute(_READ, [TAKEOVER_SECONDS]).fetchall():
                        handler_works()
                        connection.execute(EFFECT, [body["order"]])
                        connection.execute("SELECT pgmq.delete('orders', %s::bigint)", [message])
        except psycopg.Error as error:
            print(f"worker: {error}", file=sys.stderr, flush=True)
            time.sleep(0.5)


def _connect() -> psycopg.Connection:
    return psycopg.connect(os.environ["DATABASE_URL"], autocommit=True)


SYSTEM = System(
    name="pgmq",
    package="pgmq",
    tables=("pgmq.q_orders", "pgmq.a_orders"),
    prepare=prepare,
    blocks=blocks,
    worker=("-m", "benchmarks.scenarios.pgmq_loop", "--work"),
)

if __name__ == "__main__":
    if "--work" in sys.argv:
        work()
    else:
        main(SYSTEM)
