"""Application code that breaks its transaction or handler, as functions by name."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import psycopg
from django.db import DatabaseError, connections

from tests.django.shop.models import Order


def execute(sql: str, alias: str = "default") -> None:
    with connections[alias].cursor() as cursor:
        cursor.execute(sql)


def swallowed(sql: str) -> None:
    with contextlib.suppress(DatabaseError):
        execute(sql)


def locked_elsewhere() -> None:
    Order.objects.select_for_update(nowait=True).get(number="locked")


def swallowed_nowait() -> None:
    with contextlib.suppress(DatabaseError):
        locked_elsewhere()


def timed_out() -> None:
    execute("SET LOCAL statement_timeout = 20")
    swallowed("SELECT pg_sleep(5)")


def driver(sql: str) -> None:
    connections["default"].connection.execute(sql)


def pipelined() -> None:
    """The error comes when the pipeline is synchronised, which has not happened yet."""
    with contextlib.suppress(psycopg.Error), connections["default"].connection.pipeline():
        connections["default"].connection.execute("SELECT 1/0")


# Mistakes that make PostgreSQL answer COMMIT with ROLLBACK, or that end the transaction by hand.
MISTAKES: dict[str, Callable[[], None]] = {
    "failing select": lambda: swallowed("SELECT 1/0"),
    "no such table": lambda: swallowed("SELECT * FROM nowhere"),
    "nowait": swallowed_nowait,
    "statement timeout": timed_out,
    "pipeline": pipelined,
    "ROLLBACK": lambda: execute("ROLLBACK"),
    "ROLLBACK; BEGIN": lambda: execute("ROLLBACK; BEGIN"),
    "AND CHAIN": lambda: execute("/* so */ rollback and chain"),
    "driver's rollback": lambda: connections["default"].connection.rollback(),
    "driver's ROLLBACK; BEGIN": lambda: driver("ROLLBACK; BEGIN"),
    "driver's AND CHAIN": lambda: driver("ROLLBACK AND CHAIN"),
}
