"""The request's block."""

from __future__ import annotations

import json
from typing import Any

import psycopg

from benchmarks.peers import bare


def prepare() -> None:
    bare.prepare("CREATE TABLE queue (id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, body bytea)")


def block(*, plain: bool) -> bare.Block:
    def send(connection: psycopg.Connection[tuple[Any, ...]], body: dict[str, Any]) -> None:
        connection.execute("INSERT INTO queue (body) VALUES (%s)", [json.dumps(body).encode()])
        connection.execute("NOTIFY queue")

    return bare.block(None if plain else send)
