"""The request's block: the model write alone."""

from __future__ import annotations

from benchmarks.peers import orm

prepare = orm.prepare


def block(*, plain: bool) -> orm.Block:
    return orm.block(None)
