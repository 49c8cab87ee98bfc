"""The figures of a run, counted from the rows themselves: the apps' tables and the broker's views."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, LiteralString

import psycopg

# For each effect: effects without a paid order, and paid orders without the effect.
_COUNTS: Final[LiteralString] = """
SELECT count(*) FILTER (WHERE o.paid_at IS NOT NULL),
       count(s.order_id), count(p.order_id), count(c.order_id),
       count(*) FILTER (WHERE o.paid_at IS NOT NULL AND s.order_id IS NULL)
     + count(*) FILTER (WHERE o.paid_at IS NOT NULL AND p.order_id IS NULL)
     + count(*) FILTER (WHERE o.paid_at IS NOT NULL AND c.order_id IS NULL),
       count(s.order_id) FILTER (WHERE o.paid_at IS NULL)
     + count(p.order_id) FILTER (WHERE o.paid_at IS NULL)
     + count(c.order_id) FILTER (WHERE o.paid_at IS NULL)
FROM orders_order o
FULL JOIN logistics_shipment s ON s.order_id = o.id
FULL JOIN points_entry p ON p.order_id = coalesce(o.id, s.order_id)
FULL JOIN cart_clearance c ON c.order_id = coalesce(o.id, s.order_id, p.order_id)
"""

_PAID: Final[LiteralString] = "SELECT id FROM orders_order WHERE paid_at IS NOT NULL"

_FIRST_SHIPPED: Final[LiteralString] = "SELECT min(order_id) FROM logistics_shipment"

_LEFT_IN_CARTS: Final[LiteralString] = """
SELECT count(*) FROM cart_item i JOIN orders_order o ON o.id = i.order_id WHERE o.paid_at IS NOT NULL
"""

# Paid orders without a charge, and charges without a paid order or with another amount.
_CHARGES_OFF: Final[LiteralString] = """
SELECT count(*) FROM (SELECT id, total FROM orders_order WHERE paid_at IS NOT NULL) AS paid
FULL JOIN payments_charge c ON c.order_id = paid.id
WHERE paid.total IS DISTINCT FROM c.amount
"""

_NOT_SHIPPED: Final[LiteralString] = "SELECT count(*) FROM orders_order WHERE status = 'paid'"

# The last of three stages, compared with the orders.
_MINUTES_OFF: Final[LiteralString] = """
SELECT count(*)
FROM (SELECT date_trunc('minute', paid_at) AS minute, sum(total) AS income, count(*) AS orders
      FROM orders_order WHERE paid_at IS NOT NULL GROUP BY 1) AS paid
FULL JOIN income_shownminute shown USING (minute)
WHERE (paid.income, paid.orders) IS DISTINCT FROM (shown.income, shown.orders)
"""

_STATES: Final[LiteralString] = """
SELECT topic, replace(state, '_', ' ') || CASE WHEN decided_by = 'K' THEN ' by check-back' ELSE '' END, count(*)
FROM outbox.message_v1 GROUP BY 1, 2 ORDER BY 1, 2
"""

# The tables' unique keys would refuse a second effect, so a doubled one shows in these two.
_SENT_TWICE: Final[LiteralString] = """
SELECT coalesce(sum(copies - 1), 0)
FROM (SELECT count(*) AS copies FROM outbox.message_v1 WHERE state = 'committed' GROUP BY topic, key) AS by_key
"""
_HANDLED_TWICE: Final[LiteralString] = "SELECT count(*) FROM outbox.failure WHERE error ILIKE '%duplicate key%'"

_DEAD: Final[LiteralString] = "SELECT count(*) FROM outbox.dead_letter"


@dataclass(frozen=True, kw_only=True)
class Figures:
    """The figures of the databases. `states` maps (topic, state) to a number of messages."""

    paid: int
    shipments: int
    points: int
    clearances: int
    lost: int
    invented: int
    doubled: int
    dead: int
    left_in_carts: int
    not_shipped: int
    minutes_off: int
    charges_off: int
    states: Mapping[tuple[str, str], int]

    def state(self, name: str) -> int:
        """The number of messages of all topics in one state."""
        return sum(number for (_, state), number in self.states.items() if state == name)

    @property
    def settled(self) -> bool:
        """Whether all messages are finished."""
        undecided = self.state("undecided") + self.state("parked")
        unfinished = self.left_in_carts or self.not_shipped or self.minutes_off or self.charges_off
        return not (undecided or self.lost or unfinished)


def read(orders: psycopg.Connection, broker: psycopg.Connection) -> Figures:
    """Count now. The apps are read first, so a message of a counted order is in the broker's figures."""
    paid, shipments, points, clearances, lost, invented = _row(orders, _COUNTS)
    return Figures(
        paid=paid,
        shipments=shipments,
        points=points,
        clearances=clearances,
        lost=lost,
        invented=invented,
        left_in_carts=_row(orders, _LEFT_IN_CARTS)[0],
        not_shipped=_row(orders, _NOT_SHIPPED)[0],
        minutes_off=_row(orders, _MINUTES_OFF)[0],
        charges_off=_row(orders, _CHARGES_OFF)[0],
        doubled=_row(broker, _SENT_TWICE)[0] + _row(broker, _HANDLED_TWICE)[0],
        dead=_row(broker, _DEAD)[0],
        states={(topic, state): number for topic, state, number in broker.execute(_STATES)},
    )


def paid_orders(orders: psycopg.Connection) -> set[int]:
    """The numbers of the orders that are paid."""
    return {order_id for (order_id,) in orders.execute(_PAID)}


def first_shipped(orders: psycopg.Connection) -> int:
    """The lowest number of an order that has a shipment."""
    return _row(orders, _FIRST_SHIPPED)[0]


def _row(connection: psycopg.Connection, statement: LiteralString) -> tuple[int, ...]:
    row = connection.execute(statement).fetchone()
    assert row is not None
    return tuple(int(value) for value in row)
