"""The request's block: on one database, one statement more than the plain block; on two databases, three."""

from __future__ import annotations

import json
import threading
import uuid
from typing import Any

from django.db import connection as application
from django.db import transaction

from benchmarks.peers import orm
from benchmarks.peers.floor.project import TWO_PHASE, Prepared, connect
from benchmarks.peers.floor_log.project import TABLES

_SEND = """
WITH sent AS (INSERT INTO log (body) VALUES ($1::text) RETURNING id),
     decided AS (INSERT INTO decision (log_id) SELECT id FROM sent)
SELECT pg_notify('log', '')
"""
_HALF = "INSERT INTO log (body) VALUES ($1::text) RETURNING id"
_LEDGER = "INSERT INTO ledger VALUES ($1::uuid)"
# If a server crash loses this row, the broker asks back. So its COMMIT need not wait for the disk.
_END = """
WITH relaxed AS MATERIALIZED (SELECT set_config('synchronous_commit', 'off', true)),
     decided AS (INSERT INTO decision (log_id) SELECT $1::bigint FROM relaxed)
SELECT pg_notify('log', '')
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
    _of_thread.ledger(str(uuid.uuid4()))
    [[half]] = _of_thread.half(json.dumps(body))
    transaction.on_commit(lambda: _of_thread.end(half.decode()))
