"""The request's block. Like this project's, its message has a key."""

from __future__ import annotations

from typing import Any

from benchmarks.peers import orm

prepare = orm.prepare


def block(*, plain: bool) -> orm.Block:
    def send(order: Any, body: dict[str, Any]) -> None:
        from reliable_outbox import publish

        publish("order.paid", body, key=str(order.pk))

    return orm.block(None if plain else send)
