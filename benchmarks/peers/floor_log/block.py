"""The request's block: on one database, one statement more than the plain block; on two databases, three."""

from __future__ import annotations

import json
import uuid
from typing import Any

from django.db import transaction

from benchmarks.peers import orm
from benchmarks.peers.floor.project import TWO_PHASE
from benchmarks.peers.floor.statements import Statements, prepare_tables
from benchmarks.peers.floor_log.project import TABLES

_statements = Statements(
    {
        "send": """
WITH sent AS (INSERT INTO log (body) VALUES ($1::text) RETURNING id),
     decided AS (INSERT INTO decision (log_id) SELECT id FROM sent)
SELECT pg_notify('log', '')
""",
        "half": "INSERT INTO log (body) VALUES ($1::text) RETURNING id",
        "ledger": "INSERT INTO ledger VALUES ($1::uuid)",
        # If a server crash loses this row, the broker asks back. So its COMMIT need not wait for the disk.
        "end": """
WITH relaxed AS MATERIALIZED (SELECT set_config('synchronous_commit', 'off', true)),
     decided AS (INSERT INTO decision (log_id) SELECT $1::bigint FROM relaxed)
SELECT pg_notify('log', '')
""",
    }
)


def prepare() -> None:
    prepare_tables(TABLES)


def block(*, plain: bool) -> orm.Block:
    _statements.prepare()
    return orm.block(None if plain else _send_half if TWO_PHASE else _send)


def _send(order: Any, body: dict[str, Any]) -> None:
    _statements("send", json.dumps(body))


def _send_half(order: Any, body: dict[str, Any]) -> None:
    _statements("ledger", str(uuid.uuid4()))
    [[half]] = _statements("half", json.dumps(body))
    half_id = (half or b"").decode()
    transaction.on_commit(lambda: _statements("end", half_id))
