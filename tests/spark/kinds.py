"""Kinds of faults and of harmless differences. Each kind turns one correct order into its case, and names its findings.

The values that a kind needs come from a seeded `Random`. `test_matrix.py` plants all kinds in one world.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta, timezone
from decimal import Decimal
from random import Random
from typing import Any, Final

from tests.spark.world import EFFECT_TABLES, GROUPS, Order, World

Found = tuple[str, str, str]
Plant = Callable[["Case"], list[Found]]

SPAN: Final = timedelta(hours=6)
# Longer than every limit of the rules.
OVERDUE: Final = timedelta(hours=3)
# Rows, messages and effects that a kind adds have numbers from these on, so no two kinds share a key.
_ROWS, _EFFECTS, _RENAMED = 2_000_000, 3_000_000, 4_000_000
HOSTILE_TEXTS: Final = (
    "<script>alert(1)</script>", "O'Brien; DROP TABLE orders_order; --", 'say "hi", then\\n', "a,b;c\td", "two\nlines",
    "two\r\nlines", "\u202egnol", "\U0001f648\U0001f3fd", "Zo\u00eb", "Zoe\u0308", "null", "NULL", "\\N", "\\.", "",
    " ", "=HYPERLINK(\"x\")", "{}", "}{", "%s {0} ${HOME}", "\u00a0", "\ufeffx", "\u0001x", "x" * 5_000,
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Case:
    """One order of a world, which a kind changes."""

    world: World
    number: int
    random: Random

    @property
    def key(self) -> str:
        """The key of the order's message."""
        return str(self.number)

    @property
    def paid_at(self) -> datetime:
        """The time of the order's row."""
        row = self.world.app.execute("SELECT paid_at FROM orders_order WHERE id = %s", [self.number]).fetchone()
        assert row is not None
        paid: datetime = row[0]
        return paid

    @property
    def log_id(self) -> int:
        """The log id of the order's message."""
        return self.world._one("SELECT log_id FROM commit_log WHERE key = %s AND topic_id = %s", *self._message)

    @property
    def body(self) -> dict[str, Any]:
        """The order's message body."""
        row = self.world.broker.execute(
            "SELECT body FROM commit_log WHERE key = %s AND topic_id = %s", self._message
        ).fetchone()
        assert row is not None
        values: dict[str, Any] = json.loads(row[0])
        return values

    @property
    def _message(self) -> tuple[str, int]:
        return self.key, self.world.topic_id

    def row(self, assignment: str, *values: object) -> None:
        """Change the order's row."""
        self.world.app.execute(f"UPDATE orders_order SET {assignment} WHERE id = %s", [*values, self.number])

    def message(self, assignment: str, *values: object) -> None:
        """Change the order's message."""
        self.world.broker.execute(f"UPDATE commit_log SET {assignment} WHERE log_id = %s", [*values, self.log_id])

    def write(self, body: bytes | str) -> None:
        """Replace the body of the order's message."""
        self.message("body = %s", body if isinstance(body, bytes) else body.encode())

    def edit(self, **fields: object) -> None:
        """Replace fields of the body; Ellipsis removes a field."""
        values = {name: value for name, value in {**self.body, **fields}.items() if value is not ...}
        self.write(json.dumps(values, ensure_ascii=False))

    def edit_text(self, end: str) -> None:
        """Replace the last bracket of the body."""
        self.write(json.dumps(self.body, ensure_ascii=False)[:-1] + end)

    def undecide(self) -> uuid.UUID:
        """Remove the decision of the order's message, and its queue entry; return the transaction id."""
        log_id = self.log_id
        row = self.world.broker.execute("SELECT transaction_id FROM commit_log WHERE log_id = %s", [log_id]).fetchone()
        assert row is not None
        self.world.broker.execute("DELETE FROM op_log WHERE transaction_id = %s", [row[0]])
        self.world.broker.execute("DELETE FROM consume_queue WHERE log_id = %s", [log_id])
        transaction: uuid.UUID = row[0]
        return transaction

    def without_effect(self, *groups: str) -> None:
        """Remove the effects of these groups."""
        tables = {"logistics": "logistics_shipment", "points": "points_entry", "cart": "cart_clearance"}
        for group in groups:
            self.world.app.execute(f"DELETE FROM {tables[group]} WHERE order_id = %s", [self.number])


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A named change of an order."""

    name: str
    plant: Plant
    is_harmless: bool = False
    has_checksum: bool = True
    """Whether SQL can still compute the checksums: each body is JSON with a time, and each effect has a row."""


def _all() -> Iterator[Kind]:
    yield from _orphans()
    yield from _halves()
    yield from _lost()
    yield from _unreadable()
    yield from _different()
    yield from _of_groups()
    yield from _harmless()
    yield from _of_applications()


def _own(name: str, change: Callable[[Case], object]) -> Plant:
    """A change that gives the order's message the class `name`."""

    def plant(case: Case) -> list[Found]:
        change(case)
        return [(case.key, "", name)]

    return plant


def _orphans() -> Iterator[Kind]:
    def delete_row(case: Case) -> None:
        case.world.app.execute("DELETE FROM orders_order WHERE id = %s", [case.number])

    yield Kind(name="ORPHAN: the row was deleted", plant=_own("ORPHAN", delete_row), has_checksum=False)
    yield Kind(
        name="ORPHAN: the row does not satisfy `when` any more",
        plant=_own("ORPHAN", lambda case: case.row("paid_at = NULL")),
        has_checksum=False,
    )

    def change_key(case: Case) -> list[Found]:
        case.row("id = %s", _RENAMED + case.number)
        return [(case.key, "", "ORPHAN")]

    yield Kind(name="ORPHAN: the row got another key", plant=change_key, has_checksum=False)
    keys: dict[str, Callable[[Case], str]] = {
        "a space after it": lambda case: f"{case.key} ",
        "zeros before it": lambda case: f"00{case.key}",
        "full-width digits": lambda case: "".join(chr(0xFF10 + int(digit)) for digit in case.key),
        "the empty text": lambda _: "",
        "a UUID": lambda case: str(uuid.UUID(int=case.random.getrandbits(128))),
        "HTML": lambda case: f"<script>alert({case.key})</script>",
        "quotes, a comma and a line break": lambda case: f"{case.key}\"',\n;",
        "SQL": lambda case: f"{case.key}'); DROP TABLE orders_order; --",
        "a right-to-left override": lambda case: f"\u202e{case.key}",
        "a thousand characters": lambda case: case.key.ljust(1_000, "k"),
        "an invisible character": lambda case: f"{case.key}\u200b",
        "a null byte's escape": lambda case: f"\\x00{case.key}",
    }

    def renamed(made: Callable[[Case], str]) -> Plant:
        def plant(case: Case) -> list[Found]:
            key = made(case)
            case.message("key = %s", key)
            return [(key, "", "ORPHAN")]

        return plant

    for name, made in keys.items():
        yield Kind(name=f"ORPHAN: the message's key is {name}", plant=renamed(made))


def _halves() -> Iterator[Kind]:
    yield Kind(name="HALF_STUCK: undecided", plant=_own("HALF_STUCK", Case.undecide))

    def park(case: Case) -> None:
        log_id, at = case.log_id, case.paid_at
        case.world.park(case.undecide(), log_id, at)

    yield Kind(name="HALF_STUCK: parked", plant=_own("HALF_STUCK", park))

    def without_row(case: Case) -> None:
        case.undecide()
        case.world.app.execute("DELETE FROM orders_order WHERE id = %s", [case.number])

    yield Kind(name="HALF_STUCK: undecided, and no row", plant=_own("HALF_STUCK", without_row), has_checksum=False)
    yield Kind(
        name="HALF_STUCK: a second message is undecided",
        plant=_own("HALF_STUCK", lambda case: _send(case, decision=None)),
    )


def _send(case: Case, **how: Any) -> int:
    return case.world.send(Order(number=case.number, at=case.paid_at), **how)


def _lost() -> Iterator[Kind]:
    def delete(case: Case) -> None:
        log_id = case.log_id
        case.undecide()
        case.world.broker.execute("DELETE FROM commit_log WHERE log_id = %s", [log_id])

    yield Kind(name="LOST: the message is gone", plant=_own("LOST", delete))

    def roll_back(case: Case) -> None:
        log_id, at = case.log_id, case.paid_at
        case.world.decide(log_id, case.undecide(), "R", at)

    yield Kind(name="LOST: rolled back, although the row is there", plant=_own("LOST", roll_back))
    yield Kind(
        name="LOST: sent to another topic",
        plant=_own("LOST", lambda case: case.message("topic_id = %s", other_topic(case.world))),
    )

    def backdated(case: Case) -> list[Found]:
        case.world.pay(Order(number=_ROWS + case.number, at=case.paid_at))
        return [(str(_ROWS + case.number), "", "LOST")]

    yield Kind(name="LOST: a row was added without a message", plant=backdated)


def other_topic(world: World) -> int:
    """A second topic, which no rule names."""
    known = world.broker.execute("SELECT topic_id FROM topic WHERE name = 'other'").fetchone()
    if known is not None:
        return int(known[0])
    topic = world._one(
        "INSERT INTO topic (name, message_types, queue_count) VALUES ('other', '{NORMAL,TRANSACTION}', 1) "
        "RETURNING topic_id"
    )
    world.broker.execute("INSERT INTO queue (topic_id, number) VALUES (%s, 0)", [topic])
    return topic


def _unreadable() -> Iterator[Kind]:
    bodies: dict[str, Callable[[str], bytes | str]] = {
        "cut off": lambda good: good[:-5],
        "empty": lambda _: b"",
        "not UTF-8": lambda good: good.encode().replace(b"customer ", b"customer\xff"),
        "UTF-16": lambda good: good.encode("utf-16"),
        "compressed": lambda good: b"\x1f\x8b\x08\x00" + good.encode()[:20],
        "behind a byte order mark": lambda good: "\ufeff" + good,
        "two documents": lambda good: good + good,
        "followed by a bracket": lambda good: good + "}",
        "two documents with a comma": lambda good: f"{good},{good}",
        "followed by a bracket and another array": lambda good: good + "],[" + good,
        "followed by spaces and a bracket": lambda good: good + " \n}",
        "an array": lambda good: f"[{good}]",
        "a number": lambda _: "42",
        "with a comma at the end": lambda good: good[:-1] + ",}",
        "with NaN": lambda good: good[:-1] + ', "x": NaN}',
        "with a control character in a text": lambda good: good[:-1] + ', "x": "\t"}',
    }
    for name, changed in bodies.items():
        plant = _own("UNREADABLE", _written(changed))
        yield Kind(name=f"UNREADABLE: the body is {name}", plant=plant, has_checksum=False)
    values: dict[str, dict[str, object]] = {
        "an amount in words": {"total": "twelve"},
        "an amount in full-width digits": {"total": "\uff11\uff12"},
        "a hexadecimal amount": {"total": "0x0C"},
        "an amount with a comma": {"total": "12,50"},
        "an amount of 27 digits": {"total": "9" * 27},
        "a time of day alone": {"paid_at": "12:30"},
        "a day that does not exist": {"paid_at": "2025-02-30T12:00:00+00:00"},
        "a time in words": {"paid_at": "yesterday"},
    }
    for name, fields in values.items():
        plant = _own("UNREADABLE", _edited(fields))
        yield Kind(name=f"UNREADABLE: {name}", plant=plant, has_checksum="paid_at" not in fields)
    yield Kind(
        name="UNREADABLE: another content type",
        plant=_own("UNREADABLE", lambda case: case.message("content_type = 'application/octet-stream'")),
    )


def _written(changed: Callable[[str], bytes | str]) -> Callable[[Case], None]:
    """A change of the body's text."""

    def change(case: Case) -> None:
        case.write(changed(json.dumps(case.body)))

    return change


def _edited(fields: Mapping[str, object]) -> Callable[[Case], None]:
    """A change of the body's fields."""

    def change(case: Case) -> None:
        case.edit(**fields)

    return change


def _different() -> Iterator[Kind]:
    def both(case: Case) -> None:
        case.row("total = total + 1")
        case.edit(customer="x")

    def pair(ours: str | None, theirs: object) -> Callable[[Case], None]:
        def change(case: Case) -> None:
            case.row("customer = %s", ours)
            case.edit(customer=theirs)

        return change

    changes: dict[str, Callable[[Case], object]] = {
        "the row's amount changed": lambda case: case.row("total = total + 1"),
        "the amount by its sign": lambda case: case.row("total = -total"),
        "the amount by the twelfth decimal": lambda case: case.edit(total=case.body["total"] + "0000000001"),
        "the amount is missing": lambda case: case.edit(total=...),
        "the amount is null": lambda case: case.edit(total=None),
        "the time by a microsecond": lambda case: case.row("paid_at = paid_at + interval '1 microsecond'"),
        "the time by its time zone": lambda case: case.edit(
            paid_at=case.paid_at.astimezone(UTC).replace(tzinfo=timezone(timedelta(hours=2))).isoformat()
        ),
        "a text by a space": pair("customer", "customer "),
        "a text by a no-break space": pair("a b", "a\u00a0b"),
        "a text by its case": pair("Customer", "customer"),
        "a text by Unicode normalisation": pair("Zoe\u0308", "Zo\u00eb"),
        "a text by a Cyrillic letter": pair("abc", "\u0430bc"),
        "a text by an invisible character": pair("abc", "ab\u200bc"),
        "a text by the kind of line break": pair("a\nb", "a\r\nb"),
        "a text by the last of 100,000 characters": pair("x" * 100_000 + "a", "x" * 100_000 + "b"),
        "the text 'null' and null": pair("null", None),
        "the empty text and null": pair("", None),
        "the empty text and a missing field": pair("", ...),
        "the last of two equal names": lambda case: case.write(json.dumps(case.body)[:-1] + ', "total": "0.01"}'),
        "the amount and the text": both,
    }
    for name, change in changes.items():
        yield Kind(name=f"MISMATCH: {name}", plant=_own("MISMATCH", change))


def _of_groups() -> Iterator[Kind]:
    yield Kind(name="DUPLICATE: sent twice", plant=_own("DUPLICATE", lambda case: _send_again(case, case.body)))
    yield Kind(
        name="DUPLICATE: sent twice with different contents",
        plant=_own("DUPLICATE", lambda case: _send_again(case, {**case.body, "total": "0.01"})),
    )

    def decide_late(case: Case) -> None:
        case.world.broker.execute(
            "UPDATE op_log SET decided_at = decided_at + %s WHERE %s = ANY(log_ids)", [OVERDUE, case.log_id]
        )

    yield Kind(name="LATE: decided too late", plant=_own("LATE", decide_late))

    def die(case: Case) -> list[Found]:
        case.without_effect("points")
        case.world.kill_letter("points", case.log_id, case.paid_at)
        return [(case.key, "points", "DEAD")]

    def die_after_effect(case: Case) -> list[Found]:
        case.world.kill_letter("points", case.log_id, case.paid_at)
        return [(case.key, "points", "DEAD")]

    def replay_without_effect(case: Case) -> list[Found]:
        die(case)
        case.world.broker.execute("UPDATE dead_letter SET replayed_at = now() WHERE log_id = %s", [case.log_id])
        return [(case.key, "points", "UNDELIVERED")]

    yield Kind(name="DEAD: a dead letter", plant=die)
    yield Kind(name="DEAD: a dead letter beside an effect", plant=die_after_effect)
    yield Kind(name="UNDELIVERED: a replayed dead letter without an effect", plant=replay_without_effect)

    def skip(*groups: str) -> Plant:
        def plant(case: Case) -> list[Found]:
            case.without_effect(*groups)
            return [(case.key, group, "UNDELIVERED") for group in groups]

        return plant

    yield Kind(name="UNDELIVERED: one group has no effect", plant=skip("logistics"))
    yield Kind(name="UNDELIVERED: no group has an effect", plant=skip(*GROUPS))

    def other_key(case: Case) -> list[Found]:
        case.world.app.execute(
            "UPDATE logistics_shipment SET order_id = %s WHERE order_id = %s", [_EFFECTS + case.number, case.number]
        )
        return [(case.key, "logistics", "UNDELIVERED"), (str(_EFFECTS + case.number), "logistics", "ORPHAN")]

    yield Kind(name="UNDELIVERED and ORPHAN: the effect has another key", plant=other_key, has_checksum=False)

    def stray(case: Case) -> list[Found]:
        case.world.effect("cart", _EFFECTS + case.number, case.paid_at)
        return [(str(_EFFECTS + case.number), "cart", "ORPHAN")]

    yield Kind(name="ORPHAN: an effect without message and row", plant=stray, has_checksum=False)

    def twice(case: Case) -> list[Found]:
        case.world.effect("cart", case.number, case.paid_at + timedelta(seconds=5))
        return [(case.key, "cart", "DUPLICATE")]

    yield Kind(name="DUPLICATE: an effect happened twice", plant=twice)

    def slow(case: Case) -> list[Found]:
        case.world.app.execute(
            "UPDATE points_entry SET created_at = created_at + %s WHERE order_id = %s", [OVERDUE, case.number]
        )
        return [(case.key, "points", "LATE")]

    yield Kind(name="LATE: an effect came too late", plant=slow)


def _send_again(case: Case, body: dict[str, Any], **how: Any) -> int:
    return _send(case, body=json.dumps(body).encode(), **how)


def _harmless() -> Iterator[Kind]:
    def equal(case: Case) -> None:
        text = case.random.choice(HOSTILE_TEXTS)
        case.row("customer = %s", text)
        case.edit(customer=text)

    def recall(case: Case) -> None:
        case.without_effect(*GROUPS)
        case.world.broker.execute("INSERT INTO recalled (log_id) VALUES (%s)", [case.log_id])

    def replayed(case: Case) -> None:
        case.world.kill_letter("points", case.log_id, case.paid_at)
        case.world.broker.execute("UPDATE dead_letter SET replayed_at = now() WHERE log_id = %s", [case.log_id])

    def elsewhere(case: Case) -> None:
        sent = case.world.send(Order(number=case.number, at=case.paid_at))
        case.world.broker.execute(
            "UPDATE commit_log SET topic_id = %s WHERE log_id = %s", [other_topic(case.world), sent]
        )

    def unpaid(case: Case) -> None:
        case.world.pay(Order(number=_ROWS + case.number, at=case.paid_at))
        case.world.app.execute("UPDATE orders_order SET paid_at = NULL WHERE id = %s", [_ROWS + case.number])

    def offset(case: Case) -> None:
        case.edit(paid_at=case.paid_at.astimezone(timezone(timedelta(hours=5, minutes=45))).isoformat())

    changes: dict[str, Callable[[Case], object]] = {
        "a hostile text, equal on both sides": equal,
        "another hostile text, equal on both sides": equal,
        "the body has spaces and line breaks": lambda case: case.write(json.dumps(case.body, indent=2)),
        "the body has escapes": lambda case: case.write(
            "".join(json.dumps(case.body).replace("customer ", "\\u0063ustomer\\u0020"))
        ),
        "the amount is a number": lambda case: case.edit(total=float(case.body["total"])),
        "the amount has an exponent": lambda case: case.edit(total=f"{int(float(case.body['total']) * 100)}e-2"),
        "the amount has more zeros": lambda case: case.edit(total=case.body["total"] + "000"),
        "the body is nested 1,200 levels deep": lambda case: case.edit_text(
            ', "x": ' + "[" * 1_200 + "]" * 1_200 + "}"
        ),
        "the body has a number of 1,500 digits": lambda case: case.edit_text(', "x": ' + "1" * 1_500 + "}"),
        "the body has half a surrogate pair": lambda case: case.edit_text(', "x": "\\ud800"}'),
        "the time has another offset": offset,
        "the right one of two equal names is the last": lambda case: case.write(
            '{"total": "0.01", ' + json.dumps(case.body)[1:]
        ),
        "a rolled-back second message": lambda case: _send(case, decision="R"),
        "a message of another topic with this key": elsewhere,
        "a recalled message": recall,
        "a replayed dead letter with an effect": replayed,
        "a row that `when` excludes": unpaid,
    }

    def harmless(change: Callable[[Case], object]) -> Plant:
        def plant(case: Case) -> list[Found]:
            change(case)
            return []

        return plant

    for name, change in changes.items():
        has_checksum = name != "the body has half a surrogate pair"
        yield Kind(name=f"harmless: {name}", plant=harmless(change), is_harmless=True, has_checksum=has_checksum)


def _of_applications() -> Iterator[Kind]:
    """What an application does wrong rather than a careless test: exchanged keys, moved times, amounts in cents."""

    def exchanged(case: Case) -> list[Found]:
        """The neighbour of an order is a correct one: here it has the order's message, and the order has its."""
        other = str(case.number + 1)
        case.world.broker.execute(
            "UPDATE commit_log SET key = CASE key WHEN %s THEN %s ELSE %s END WHERE key IN (%s, %s) AND topic_id = %s",
            [case.key, other, case.key, case.key, other, case.world.topic_id],
        )
        return [(case.key, "", "MISMATCH"), (other, "", "MISMATCH")]

    yield Kind(name="MISMATCH: two messages have each other's key", plant=exchanged)
    for name, step, of_groups in (("backdated", -OVERDUE / 6, "LATE"), ("postdated", OVERDUE / 6, "EARLY")):

        def dated(case: Case, step: timedelta = step, of_groups: str = of_groups) -> list[Found]:
            case.row("paid_at = paid_at + %s", step)
            return [(case.key, "", "MISMATCH"), *((case.key, group, of_groups) for group in GROUPS)]

        yield Kind(name=f"MISMATCH and {of_groups}: the row was {name}", plant=dated)

    def digits(theirs: str) -> Callable[[Case], None]:
        """The row's amount has more digits than a double; the message's is the number `theirs`."""

        def change(case: Case) -> None:
            case.row("total = 1234567890123456789.01")
            case.write(json.dumps({**case.body, "total": 0}).replace('"total": 0', f'"total": {theirs}'))

        return change

    changes: dict[str, Callable[[Case], object]] = {
        "the amount became zero": lambda case: case.edit(total="0.00"),
        "the amount in cents": lambda case: case.edit(total=int(float(case.body["total"]) * 100)),
        "the amount by a digit that no double has": digits("123456789012345678902e-2"),
        "the amount is infinite": lambda case: case.edit(total="Infinity"),
        "the amount is not a number": lambda case: case.edit(total="NaN"),
        "the last of two equal names, in escapes": lambda case: case.edit_text(', "t\\u006ftal": "0.01"}'),
    }
    for name, change in changes.items():
        yield Kind(name=f"MISMATCH: {name}", plant=_own("MISMATCH", change))
    plant = _own("UNREADABLE", _edited({"total": "12.50 EUR"}))
    yield Kind(name="UNREADABLE: an amount with its currency", plant=plant)
    yield Kind(
        name="DUPLICATE: sent again hours later",
        plant=_own("DUPLICATE", lambda case: _send_again(case, case.body, stored_at=case.paid_at + OVERDUE)),
    )

    def again(case: Case) -> list[Found]:
        case.world.effect("cart", case.number, case.paid_at + OVERDUE)
        return [(case.key, "cart", "DUPLICATE")]

    yield Kind(name="DUPLICATE: an effect happened again hours later", plant=again)

    def recall(case: Case) -> list[Found]:
        case.without_effect("logistics")
        case.world.broker.execute("INSERT INTO recalled (log_id) VALUES (%s)", [case.log_id])
        return [(case.key, group, "DUPLICATE") for group in GROUPS if group != "logistics"]

    yield Kind(name="DUPLICATE: groups acted on a recalled message", plant=recall)

    def older(case: Case) -> list[Found]:
        log_id = case.log_id
        case.message("born_at = born_at - %s, stored_at = stored_at - %s", OVERDUE / 6, OVERDUE / 6)
        case.world.broker.execute(
            "UPDATE op_log SET decided_at = decided_at - %s WHERE %s = ANY(log_ids)", [OVERDUE / 6, log_id]
        )
        return []

    yield Kind(name="harmless: the message is older than its row", plant=older, is_harmless=True)

    def same_digits(case: Case) -> list[Found]:
        digits("123456789012345678901e-2")(case)
        return []

    name = "harmless: the amount has an exponent and more digits than a double"
    yield Kind(name=name, plant=same_digits, is_harmless=True)
    yield from _of_order_services()


def _of_order_services() -> Iterator[Kind]:
    """What happens to an order between its row, its message and its effects."""

    def of_groups(key: object, name: str) -> list[Found]:
        return [(str(key), group, name) for group in GROUPS]

    def merge(case: Case) -> list[Found]:
        other = case.number + 1
        case.world.app.execute("DELETE FROM orders_order WHERE id = %s", [case.number])
        for table in EFFECT_TABLES.values():
            case.world.app.execute(f"UPDATE {table} SET order_id = %s WHERE order_id = %s", [other, case.number])
        return [(case.key, "", "ORPHAN"), *of_groups(other, "DUPLICATE")]

    name = "ORPHAN and DUPLICATE: two orders were merged, with their effects"
    yield Kind(name=name, plant=merge, has_checksum=False)

    def reuse(case: Case) -> list[Found]:
        order = Order(number=case.number, at=case.paid_at + OVERDUE / 6, total=Decimal("99.00"))
        case.row("paid_at = %s, total = %s, customer = %s", order.at, order.total, order.customer)
        case.world.send(order)
        case.world.handle(order)
        return [(case.key, "", "DUPLICATE")]

    yield Kind(name="DUPLICATE: a newer order got the number of an older one", plant=reuse)

    def respell(case: Case) -> list[Found]:
        sent = _send_again(case, case.body)
        case.world.broker.execute("UPDATE commit_log SET key = %s WHERE log_id = %s", [f"0{case.key}", sent])
        case.world.handle(Order(number=case.number, at=case.paid_at))
        return [(f"0{case.key}", "", "ORPHAN"), *of_groups(case.key, "DUPLICATE")]

    name = "ORPHAN and DUPLICATE: sent again with another spelling of its key"
    yield Kind(name=name, plant=respell, has_checksum=False)

    def exchange_effects(case: Case) -> list[Found]:
        """The later order has the effect of the earlier one, which is older than its row."""
        other = case.number + 1
        case.world.app.execute(
            "UPDATE logistics_shipment SET order_id = CASE order_id WHEN %s THEN %s ELSE %s END "
            "WHERE order_id IN (%s, %s)",
            [case.number, other, case.number, case.number, other],
        )
        return [(str(other), "logistics", "EARLY")]

    yield Kind(name="EARLY: two orders have each other's effect", plant=exchange_effects)

    def load(case: Case) -> list[Found]:
        order = Order(number=_ROWS + case.number, at=case.paid_at)
        case.world.pay(order)
        case.world.send(order, stored_at=order.at + OVERDUE)
        case.world.handle(order, after=OVERDUE)
        return [(str(order.number), "", "LATE"), *of_groups(order.number, "LATE")]

    yield Kind(name="LATE: an old order was imported, with its message", plant=load)

    def hurry(case: Case) -> list[Found]:
        case.message("deliver_at = %s", case.paid_at + OVERDUE / 9)
        return of_groups(case.key, "EARLY")

    yield Kind(name="EARLY: the effects came before a delayed message was due", plant=hurry)

    def replace(case: Case) -> list[Found]:
        log_id, body = case.log_id, case.body
        case.message("deliver_at = %s", case.paid_at + timedelta(days=7_300))
        case.world.broker.execute("INSERT INTO recalled (log_id) VALUES (%s)", [log_id])
        _send_again(case, body)
        case.without_effect("logistics")
        return [(case.key, "logistics", "UNDELIVERED")]

    yield Kind(name="UNDELIVERED: a recalled message was sent again at once", plant=replace)

    def misdate(case: Case) -> list[Found]:
        case.row("paid_at = paid_at + interval '30 years'")
        return [(case.key, "", "MISMATCH"), *of_groups(case.key, "EARLY")]

    yield Kind(name="MISMATCH and EARLY: the row is of a year in the future", plant=misdate)
    for name, hours, findings in (
        ("EARLY: the publisher's times are local, east of UTC", 2, ()),
        ("LATE: the publisher's times are local, west of UTC", -2, ("",)),
    ):

        def shift(case: Case, hours: int = hours, findings: tuple[str, ...] = findings) -> list[Found]:
            at = case.paid_at + timedelta(hours=hours)
            case.row("paid_at = %s", at)
            case.edit(paid_at=at.isoformat())
            of_message = [(case.key, group, "LATE") for group in findings]
            return [*of_message, *of_groups(case.key, "LATE" if findings else "EARLY")]

        yield Kind(name=name, plant=shift)

    def rewrite(case: Case) -> None:
        body = {**case.body, "total": "99.00"}
        case.row("total = 99")
        _send_again(case, body, decision="R")

    yield Kind(
        name="MISMATCH: the row was rewritten, and its second message rolled back", plant=_own("MISMATCH", rewrite)
    )

    def round_up(case: Case) -> None:
        case.row("total = 12.345")
        case.edit(total="12.345")

    yield Kind(name="MISMATCH: the column rounded the third decimal of the amount", plant=_own("MISMATCH", round_up))

    def time_out(case: Case) -> list[Found]:
        case.without_effect("points")
        case.world.broker.execute(
            "INSERT INTO timed_out (group_id, log_id, queue_id, queue_offset) VALUES (%s, %s, %s, 0)",
            [case.world.groups["points"], case.log_id, case.world.queue_id],
        )
        return []

    yield Kind(name="harmless: the time limit of a message was over for one group", plant=time_out, is_harmless=True)


KINDS: Final = tuple(_all())


def clean(world: World) -> None:
    """Correct orders over SPAN: one for each kind, and a neighbour of each that stays correct."""
    other_topic(world)
    world.app.execute("ALTER TABLE orders_order ALTER total TYPE numeric(30, 2)")
    count = 2 * len(KINDS)
    world.add_many(count, every=SPAN / count)


def plant(world: World, seed: int, chosen: Callable[[Kind], bool] = lambda _: True) -> dict[str, list[Found]]:
    """Plant the chosen kinds in the orders of `clean`, in an order that the seed decides; the findings of each kind."""
    random = Random(seed)
    places = list(range(len(KINDS)))
    random.shuffle(places)
    return {
        kind.name: kind.plant(Case(world=world, number=2 * place + 1, random=random))
        for kind, place in zip(KINDS, places, strict=True)
        if chosen(kind)
    }
