"""The request's block: one statement more than the plain block, or, with two databases, three."""

from __future__ import annotations

import json
import threading
import uuid
from typing import Any

from django.db import connection as application
from django.db import transaction

from benchmarks.peers import orm
from benchmarks.peers.floor.project import TABLES, TWO_PHASE, Prepared, connect

_SEND = "WITH sent AS (INSERT INTO message (body) VALUES ($1::text)) SELECT pg_notify('message', '')"
_HALF = "INSERT INTO message (transaction_id, body) VALUES ($1::uuid, $2::text)"
_LEDGER = "INSERT INTO ledger VALUES ($1::uuid)"
# If a server crash loses this row, the broker asks back. So its COMMIT need not wait for the disk.
_END = """
WITH relaxed AS MATERIALIZED (SELECT set_config('synchronous_commit', 'off', true)),
     ended AS (INSERT INTO decision SELECT $1::uuid FROM relaxed)
SELECT pg_notify('message', '')
"""
_of_thread = threading.local()


def prepare() -> None:
    orm.prepare()
    with application.cursor() as cursor:
        cursor.execute(TABLES)
    if TWO_PHASE:
        with connect() as broker:
            broker.execute(TABLES)


def block(*, plain: bool) -> orm.Block:
    run = orm.block(None if plain else _send_half if TWO_PHASE else _send)
    if not hasattr(_of_thread, "statements"):
        application.ensure_connection()
        raw = application.connection
        if TWO_PHASE:
            _of_thread.broker = connect()
            _of_thread.half = Prepared(_of_thread.broker, "half", _HALF)
            _of_thread.end = Prepared(_of_thread.broker, "end", _END)
            _of_thread.ledger = Prepared(raw, "ledger", _LEDGER)
        else:
            _of_thread.send = Prepared(raw, "send", _SEND)
        _of_thread.statements = True
    return run


def _send(order: Any, body: dict[str, Any]) -> None:
    _of_thread.send(json.dumps(body))


def _send_half(order: Any, body: dict[str, Any]) -> None:
    transaction_id = str(uuid.uuid4())
    _of_thread.half(transaction_id, json.dumps(body))
    _of_thread.ledger(transaction_id)
    transaction.on_commit(lambda: _of_thread.end(transaction_id))
