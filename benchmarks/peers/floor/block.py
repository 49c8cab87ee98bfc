"""The request's block: one statement more than the plain block, or, with two databases, three."""

from __future__ import annotations

import json
import uuid
from typing import Any

from django.db import transaction

from benchmarks.peers import orm
from benchmarks.peers.floor.project import TABLES, TWO_PHASE
from benchmarks.peers.floor.statements import Statements, prepare_tables

_statements = Statements(
    {
        "send": "WITH sent AS (INSERT INTO message (body) VALUES ($1::text)) SELECT pg_notify('message', '')",
        "half": "INSERT INTO message (transaction_id, body) VALUES ($1::uuid, $2::text)",
        "ledger": "INSERT INTO ledger VALUES ($1::uuid)",
        # If a server crash loses this row, the broker asks back. So its COMMIT need not wait for the disk.
        "end": """
WITH relaxed AS MATERIALIZED (SELECT set_config('synchronous_commit', 'off', true)),
     ended AS (INSERT INTO decision SELECT $1::uuid FROM relaxed)
SELECT pg_notify('message', '')
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
    transaction_id = str(uuid.uuid4())
    _statements("half", transaction_id, json.dumps(body))
    _statements("ledger", transaction_id)
    transaction.on_commit(lambda: _statements("end", transaction_id))
