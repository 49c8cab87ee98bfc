"""A shop and a broker in PostgreSQL, filled by SQL as the framework would fill them, for faults to be planted in."""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from pathlib import Path

import psycopg

GROUPS = ("logistics", "points", "cart")
EFFECT_TABLES = {"logistics": "logistics_shipment", "points": "points_entry", "cart": "cart_clearance"}
START = datetime(2025, 6, 1, 12, tzinfo=UTC)

SHOP = """
CREATE TABLE orders_order (id bigint PRIMARY KEY, customer text NOT NULL, total numeric(12,2) NOT NULL,
    status text NOT NULL, created_at timestamptz NOT NULL, paid_at timestamptz, attachment bytea);
CREATE INDEX ON orders_order (paid_at);
CREATE TABLE logistics_shipment (id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, order_id bigint NOT NULL,
    created_at timestamptz NOT NULL);
CREATE TABLE points_entry (id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, order_id bigint NOT NULL,
    customer text NOT NULL, points integer NOT NULL, created_at timestamptz NOT NULL);
CREATE TABLE cart_clearance (id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, order_id bigint NOT NULL,
    customer text NOT NULL, created_at timestamptz NOT NULL);
CREATE TABLE outbox_inbox (consumer_group text, generation integer, message_id uuid,
    handled_at timestamptz NOT NULL, PRIMARY KEY (consumer_group, generation, message_id));
"""

RULES = """
version = 1
title = "Orders"

[database.app]
env = "RECONCILE_APP"

[database.broker]
env = "RECONCILE_BROKER"
schema = "outbox"

[broker]
database = "broker"

[[rule]]
name = "order-paid"
database = "app"
table = "orders_order"
key = "id"
when = "paid_at IS NOT NULL"
time = "paid_at"
topic = "order.paid"
grace = "30s"
late_after = "5m"
stuck_after = "15m"
{extra}

[[rule.field]]
column = "total"
type = "decimal"

[[rule.field]]
column = "customer"

[[rule.field]]
column = "paid_at"
type = "timestamp"
{groups}
"""


def group_rules(names: Sequence[str] = GROUPS) -> str:
    """The [[rule.group]] tables of these groups."""
    return "".join(
        f'\n[[rule.group]]\nname = "{name}"\ntable = "{EFFECT_TABLES[name]}"\nkey = "order_id"\n'
        f'time = "created_at"\nwithin = "10m"\n'
        for name in names
    )


def write_rules(folder: Path, *, groups: Sequence[str] = GROUPS, extra: str = "", text: str | None = None) -> Path:
    """A rules file over the two databases of `World`."""
    path = folder / "reconcile.toml"
    path.write_text(text or RULES.format(extra=extra, groups=group_rules(groups)), encoding="utf-8")
    return path


@dataclass(kw_only=True)
class Order:
    """An order with everything that follows from it; `at` is when it was paid."""

    number: int
    at: datetime = START
    total: Decimal = Decimal("12.50")
    message_id: uuid.UUID = field(default_factory=uuid.uuid4)

    @property
    def customer(self) -> str:
        return f"customer {self.number % 7}"

    @property
    def body(self) -> bytes:
        content = {
            "order_id": self.number,
            "customer": self.customer,
            "total": str(self.total),
            "paid_at": self.at.isoformat(),
        }
        return json.dumps(content).encode()


class World:
    """Both databases, with helpers that write rows as the framework does, and helpers that plant faults."""

    def __init__(self, app_url: str, broker_url: str) -> None:
        self.app_url, self.broker_url = app_url, broker_url
        self.app = psycopg.connect(app_url, autocommit=True)
        self.broker = psycopg.connect(broker_url, autocommit=True)
        self.broker.execute("SET search_path TO outbox")
        self._declare("order.paid")

    def close(self) -> None:
        self.app.close()
        self.broker.close()

    @property
    def environment(self) -> Mapping[str, str]:
        return {"RECONCILE_APP": self.app_url, "RECONCILE_BROKER": self.broker_url}

    def _declare(self, topic: str) -> None:
        self.topic_id = self._one(
            "INSERT INTO topic (name, message_types, queue_count) VALUES (%s, '{NORMAL,TRANSACTION}', 1) "
            "RETURNING topic_id",
            topic,
        )
        self.queue_id = self._one(
            "INSERT INTO queue (topic_id, number) VALUES (%s, 0) RETURNING queue_id", self.topic_id
        )
        self.groups: dict[str, int] = {}
        for name in GROUPS:
            group = self._one("INSERT INTO consumer_group (name) VALUES (%s) RETURNING group_id", name)
            self.groups[name] = group
            self.broker.execute(
                "INSERT INTO subscription (group_id, topic_id, mode) VALUES (%s, %s, 'concurrent')",
                [group, self.topic_id],
            )
            retry = self._one(
                "INSERT INTO topic (name, message_types, queue_count, retry_of) VALUES (%s, '{NORMAL}', 1, %s) "
                "RETURNING topic_id",
                f"%RETRY%{name}",
                group,
            )
            self.broker.execute("INSERT INTO queue (topic_id, number) VALUES (%s, 0)", [retry])

    def _one(self, statement: str, *parameters: object) -> int:
        row = self.broker.execute(statement, parameters).fetchone()
        assert row is not None
        return int(row[0])

    def add(self, *orders: Order) -> None:
        """Orders as they should be: row, committed and queued message, all effects, all groups past it."""
        for order in orders:
            self.pay(order)
            self.send(order)
            self.handle(order)

    def add_many(self, count: int, *, first: int = 1, every: timedelta = timedelta(milliseconds=10)) -> None:
        """`count` orders as they should be, in few statements."""
        step = every.total_seconds()
        self.app.execute(
            "INSERT INTO orders_order (id, customer, total, status, created_at, paid_at) "
            "SELECT n, 'customer ' || n %% 7, n %% 100 + 0.50, 'paid', t, t "
            "FROM (SELECT n, %s::timestamptz + (n - 1) * %s * interval '1 s' AS t "
            "FROM generate_series(%s::bigint, %s::bigint) n) g",
            [START, step, first, first + count - 1],
        )
        for table, more, values in (
            ("logistics_shipment", "", ""),
            ("points_entry", ", customer, points", ", customer, 1"),
            ("cart_clearance", ", customer", ", customer"),
        ):
            self.app.execute(
                f"INSERT INTO {table} (order_id, created_at{more}) SELECT id, paid_at + interval '1 s'{values} "
                "FROM orders_order WHERE id >= %s",
                [first],
            )
        with self.broker.transaction():
            self.broker.execute(
                "CREATE TEMP TABLE given ON COMMIT DROP AS "
                "SELECT n, %s::timestamptz + (n - 1) * %s * interval '1 s' AS t, "
                "gen_random_uuid() AS id FROM generate_series(%s::bigint, %s::bigint) n",
                [START, step, first, first + count - 1],
            )
            self.broker.execute(
                "INSERT INTO commit_log (born_at, stored_at, transaction_id, message_id, topic_id, half, key, tag, "
                "content_type, body) SELECT t, t, id, id, %s, true, n::text, '', 'application/json', "
                "convert_to(json_build_object('order_id', n, 'customer', 'customer ' || n %% 7, 'total', "
                "(n %% 100 + 0.50)::numeric(12,2)::text, 'paid_at', t)::text, 'UTF8') FROM given ORDER BY n",
                [self.topic_id],
            )
            self.broker.execute(
                "INSERT INTO op_log (decided_at, transaction_id, decision, decided_by, log_ids) "
                "SELECT g.t + interval '5 ms', g.id, 'C', 'P', ARRAY[l.log_id] FROM given g "
                "JOIN commit_log l ON l.message_id = g.id"
            )
            self.broker.execute(
                "INSERT INTO consume_queue (queue_offset, log_id, queue_id, attempt) "
                "SELECT (SELECT count(*) FROM consume_queue) + row_number() OVER (ORDER BY l.log_id) - 1, l.log_id, "
                "%s, 0 "
                "FROM given g JOIN commit_log l ON l.message_id = g.id",
                [self.queue_id],
            )
        self.consume_all()

    def pay(self, order: Order, connection: psycopg.Connection | None = None) -> None:
        """The business row."""
        (connection or self.app).execute(
            "INSERT INTO orders_order (id, customer, total, status, created_at, paid_at) "
            "VALUES (%s, %s, %s, 'paid', %s, %s)",
            [order.number, order.customer, order.total, order.at, order.at],
        )

    def send(
        self,
        order: Order,
        *,
        decision: str | None = "C",
        body: bytes | None = None,
        stored_at: datetime | None = None,
        decided_at: datetime | None = None,
        deliver_at: datetime | None = None,
        content_type: str = "application/json",
        message_id: uuid.UUID | None = None,
    ) -> int:
        """The half message, its decision (None: undecided) and its queue entry; returns the log id."""
        message_id = message_id or order.message_id
        stored = stored_at or order.at
        log_id = self._one(
            "INSERT INTO commit_log (born_at, stored_at, deliver_at, transaction_id, message_id, topic_id, half, "
            "key, tag, content_type, body) VALUES (%s, %s, %s, %s, %s, %s, true, %s, '', %s, %s) RETURNING log_id",
            stored,
            stored,
            deliver_at,
            message_id,
            message_id,
            self.topic_id,
            str(order.number),
            content_type,
            order.body if body is None else body,
        )
        if decision is not None:
            self.decide(log_id, message_id, decision, decided_at or stored)
        return log_id

    def decide(self, log_id: int, transaction_id: uuid.UUID, decision: str, at: datetime) -> None:
        """The op row and, for a commit, the queue entry."""
        self.broker.execute(
            "INSERT INTO op_log (decided_at, transaction_id, decision, decided_by, log_ids) "
            "VALUES (%s, %s, %s, 'P', %s)",
            [at, transaction_id, decision, [log_id]],
        )
        if decision == "C":
            self.broker.execute(
                "INSERT INTO consume_queue (queue_offset, log_id, queue_id, attempt) "
                "SELECT coalesce(max(queue_offset) + 1, 0), %s, %s, 0 FROM consume_queue WHERE queue_id = %s",
                [log_id, self.queue_id, self.queue_id],
            )

    def handle(self, order: Order, *, groups: Sequence[str] = GROUPS, after: timedelta = timedelta(seconds=1)) -> None:
        """The effects of these groups, and their offsets."""
        for group in groups:
            self.effect(group, order.number, order.at + after)
        self.consume_all()

    def effect(self, group: str, number: int, at: datetime) -> None:
        """One effect row."""
        more = {"logistics": ("", ""), "points": (", customer, points", ", 'x', 1"), "cart": (", customer", ", 'x'")}[
            group
        ]
        self.app.execute(
            f"INSERT INTO {EFFECT_TABLES[group]} (order_id, created_at{more[0]}) VALUES (%s, %s{more[1]})",
            [number, at],
        )

    def consume_all(self) -> None:
        """Every group's offset is at the end of the queue."""
        self.broker.execute(
            "INSERT INTO consumer_offset (next_offset, epoch, ordinal, start_offset, group_id, queue_id) "
            "SELECT (SELECT count(*) FROM consume_queue WHERE queue_id = %s), 1, "
            "coalesce((SELECT max(ordinal) FROM consumer_offset o WHERE o.group_id = g.group_id), 0) + 1, 0, "
            "g.group_id, %s "
            "FROM consumer_group g",
            [self.queue_id, self.queue_id],
        )

    def kill_letter(self, group: str, log_id: int, at: datetime) -> None:
        """A dead letter."""
        self.broker.execute(
            "INSERT INTO dead_letter (group_id, log_id, attempts, error, dead_at) VALUES (%s, %s, 16, 'boom', %s)",
            [self.groups[group], log_id, at],
        )

    def park(self, transaction_id: uuid.UUID, log_id: int, at: datetime) -> None:
        """The half message is past the check limits."""
        self.broker.execute(
            "INSERT INTO pending_check (transaction_id, log_id, producer_group, stored_at, immune_until, due_at, "
            "parked_at) VALUES (%s, %s, 'orders', %s, %s, %s, %s)",
            [transaction_id, log_id, at, at, at, at],
        )

    def check(self, transaction_id: uuid.UUID, answer: str, text: str, at: datetime) -> None:
        """A check-back that was answered."""
        self.broker.execute(
            "INSERT INTO check_history (transaction_id, checked_at, answer, detail) VALUES (%s, %s, %s, %s)",
            [transaction_id, at, answer, text],
        )

    def fail(self, group: str, log_id: int, attempt: int, error: str, at: datetime) -> None:
        """An attempt of a handler that failed."""
        self.broker.execute(
            "INSERT INTO failure (group_id, log_id, attempt, error, failed_at) VALUES (%s, %s, %s, %s, %s)",
            [self.groups[group], log_id, attempt, error, at],
        )
