"""The request's block: Celery's own task class for Django sends on commit."""

from __future__ import annotations

from typing import Any

from benchmarks.peers import orm

prepare = orm.prepare


def block(*, plain: bool) -> orm.Block:
    def send(order: Any, body: dict[str, Any]) -> None:
        from benchmarks.peers.celery_redis.app import paid

        paid.delay_on_commit(body)

    return orm.block(None if plain else send)
