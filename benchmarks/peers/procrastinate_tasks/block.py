"""The request's block."""

from __future__ import annotations

from typing import Any

from benchmarks.peers import orm

prepare = orm.prepare


def block(*, plain: bool) -> orm.Block:
    def send(order: Any, body: dict[str, Any]) -> None:
        from benchmarks.peers.procrastinate_tasks.tasks import paid

        paid.defer(body=body)

    return orm.block(None if plain else send)
