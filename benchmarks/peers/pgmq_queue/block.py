"""The request's block."""

from __future__ import annotations

from typing import Any

import psycopg
from psycopg.types.json import Jsonb

from benchmarks.peers import bare


def prepare() -> None:
    from pgmq.install import get_embedded_install_sql

    script = get_embedded_install_sql()
    bare.prepare(b"CREATE SCHEMA IF NOT EXISTS pgmq", script.encode(), b"SELECT pgmq.create('orders')")


def block(*, plain: bool) -> bare.Block:
    def send(connection: psycopg.Connection[tuple[Any, ...]], body: dict[str, Any]) -> None:
        connection.execute("SELECT pgmq.send('orders', %s)", [Jsonb(body)])

    return bare.block(None if plain else send)
