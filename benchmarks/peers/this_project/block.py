"""The request's block."""

from __future__ import annotations

from typing import Any

from benchmarks.peers import orm
from benchmarks.peers.this_project.project import TOPIC

prepare = orm.prepare


def block(*, plain: bool) -> orm.Block:
    def send(order: Any, body: dict[str, Any]) -> None:
        from outbox.contrib.django import publish

        publish(TOPIC, body, key=order.pk)

    return orm.block(None if plain else send)
