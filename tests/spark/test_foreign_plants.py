"""Faults that follow from the promise alone (nothing lost, invented, twice, wrong, out of order or before its row), and
rare values in keys and bodies, each among thousands of correct pairs.

Every plant names the finding that it must cause, or none if it only looks like a fault. All plants are judged together,
and the findings must be exactly the planted ones. The plants share no code with the kinds of `test_matrix`. Another
seed plants into other rows, in another order, at other times.
"""

from __future__ import annotations

import json
import random
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.sql import SparkSession

from tests.spark.conftest import Reconciler
from tests.spark.exports import TABLES, VIEWS, export_parquet
from tests.spark.world import RULES, START, World, group_rules

pytestmark = pytest.mark.timeout(600)

ORDERS = 3000
STEP = timedelta(seconds=3)
PARCELS = 300
MACHINES = 200

MORE_TABLES = """
CREATE TABLE refund (order_id bigint NOT NULL, total numeric(12,2) NOT NULL, created_at timestamptz NOT NULL);
CREATE TABLE machine (code text PRIMARY KEY, level integer NOT NULL, moved_at timestamptz NOT NULL);
CREATE TABLE parcel (code text PRIMARY KEY, note text, weight numeric, seq numeric(30), sealed boolean, sent_on date,
    seen timestamptz, ref uuid, packed_at timestamptz NOT NULL);
"""

MORE_RULES = """
[[rule.group]]
name = "refunds"
table = "refund"
key = "order_id"
time = "created_at"
within = "10m"
sum_effect = {total = "total"}

[[rule]]
name = "machines"
database = "app"
table = "machine"
key = "code"
time = "moved_at"
topic = "machine.moved"
messages = "at_least_one"

[[rule.field]]
column = "level"
type = "integer"

[[rule]]
name = "parcels"
database = "app"
table = "parcel"
key = "code"
time = "packed_at"
topic = "parcel.packed"
""" + "".join(
    f'\n[[rule.field]]\ncolumn = "{column}"\ntype = "{kind}"\n'
    for column, kind in (
        ("note", "text"),
        ("weight", "decimal"),
        ("seq", "integer"),
        ("sealed", "boolean"),
        ("sent_on", "date"),
        ("seen", "timestamp"),
        ("ref", "uuid"),
        ("packed_at", "timestamp"),
    )
)

# Key and group ("" is the message) of a finding, and its class.
Findings = dict[tuple[str, str], str]


class Shop(World):
    """The world with refunds, machines and parcels."""

    def __init__(self, app_url: str, broker_url: str) -> None:
        super().__init__(app_url, broker_url)
        self.app.execute(MORE_TABLES)
        self.queues = {"order.paid": (self.topic_id, self.queue_id)}
        for topic in ("machine.moved", "parcel.packed", "elsewhere"):
            made = self._one(
                "INSERT INTO topic (name, message_types, queue_count) VALUES (%s, '{TRANSACTION}', 1) "
                "RETURNING topic_id",
                topic,
            )
            queue = self._one("INSERT INTO queue (topic_id, number) VALUES (%s, 0) RETURNING queue_id", made)
            self.queues[topic] = made, queue

    def emit(
        self, topic: str, key: str, body: bytes, at: datetime, *, decision: str = "C", after: timedelta = timedelta()
    ) -> None:
        """A half message stored at `at`, and decided `after` it."""
        topic_id, queue_id = self.queues[topic]
        message_id = uuid.uuid4()
        log_id = self._one(
            "INSERT INTO commit_log (born_at, stored_at, transaction_id, message_id, topic_id, half, key, tag, "
            "content_type, body) VALUES (%s, %s, %s, %s, %s, true, %s, '', 'application/json', %s) RETURNING log_id",
            at, at, message_id, message_id, topic_id, key, body,
        )  # fmt: skip
        self.broker.execute(
            "INSERT INTO op_log (decided_at, transaction_id, decision, decided_by, log_ids) "
            "VALUES (%s, %s, %s, 'P', %s)",
            [at + after, message_id, decision, [log_id]],
        )
        if decision == "C":
            self.broker.execute(
                "INSERT INTO consume_queue (queue_offset, log_id, queue_id, attempt) "
                "SELECT coalesce(max(queue_offset) + 1, 0), %s, %s, 0 FROM consume_queue WHERE queue_id = %s",
                [log_id, queue_id, queue_id],
            )

    def fill(self) -> None:
        """Orders, refunds and machines as they should be: a refund has two parts, a machine moves three times."""
        self.add_many(ORDERS, every=STEP)
        self.app.execute(
            "INSERT INTO refund (order_id, total, created_at) SELECT id, part, paid_at + interval '2 s' "
            "FROM orders_order, LATERAL (VALUES (0.2), (total - 0.2)) p (part)"
        )
        for number in range(MACHINES):
            self.move(f"machine {number}", place_of(number * 15))

    def move(self, code: str, at: datetime, levels: tuple[int, ...] = (1, 2, 3), *, row: int = 3) -> None:
        """A machine at level `row`, and a message per level, a second apart."""
        self.app.execute("INSERT INTO machine VALUES (%s, %s, %s)", [code, row, at])
        for second, level in enumerate(levels):
            self.emit("machine.moved", code, json.dumps({"level": level}).encode(), at + timedelta(seconds=second))

    def body(self, number: int) -> dict[str, Any]:
        """The body of an order's message."""
        (body,) = self.broker.execute("SELECT body FROM commit_log WHERE key = %s", [str(number)]).fetchone() or ()
        found: dict[str, Any] = json.loads(body)
        return found

    def rewrite(self, number: int, body: bytes | Mapping[str, Any]) -> None:
        """Replaces the body of an order's message."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        assert self.broker.execute("UPDATE commit_log SET body = %s WHERE key = %s", [data, str(number)]).rowcount == 1

    def in_app(self, statement: str, *parameters: object) -> None:
        """Changes exactly one row of the application."""
        assert self.app.execute(statement, parameters).rowcount == 1

    def in_broker(self, statement: str, *parameters: object) -> None:
        """Changes exactly one row of the broker."""
        assert self.broker.execute(statement, parameters).rowcount == 1


def place_of(number: int) -> datetime:
    """When the order was paid."""
    return START + (number - 1) * STEP


# ---- Faults. Each plant gets the shop and two orders of its own, and returns the findings that it causes.

Plant = Callable[[Shop, int, int], Findings]
MINUTE = timedelta(minutes=1)


def message_removed(shop: Shop, order: int, _: int) -> Findings:
    shop.in_broker("DELETE FROM commit_log WHERE key = %s", str(order))
    return {(str(order), ""): "LOST"}


def rolled_back_although_the_row_is_there(shop: Shop, order: int, _: int) -> Findings:
    shop.in_broker(
        "UPDATE op_log SET decision = 'R' WHERE log_ids[1] = (SELECT log_id FROM commit_log WHERE key = %s)", str(order)
    )
    return {(str(order), ""): "LOST"}


def sent_to_another_topic(shop: Shop, order: int, _: int) -> Findings:
    shop.in_broker("UPDATE commit_log SET topic_id = %s WHERE key = %s", shop.queues["elsewhere"][0], str(order))
    return {(str(order), ""): "LOST"}


def never_decided(shop: Shop, order: int, _: int) -> Findings:
    shop.in_broker("DELETE FROM op_log WHERE log_ids[1] = (SELECT log_id FROM commit_log WHERE key = %s)", str(order))
    return {(str(order), ""): "HALF_STUCK"}


def invented(shop: Shop, order: int, _: int) -> Findings:
    key = f"{order}000001"
    shop.emit("order.paid", key, json.dumps({**shop.body(order), "customer": "nobody"}).encode(), place_of(order))
    return {(key, ""): "ORPHAN"}


def order_was_never_paid(shop: Shop, order: int, _: int) -> Findings:
    shop.in_app("UPDATE orders_order SET paid_at = NULL WHERE id = %s", order)
    return {(str(order), ""): "ORPHAN"}


def row_rolled_back_after_the_message(shop: Shop, order: int, _: int) -> Findings:
    shop.in_app("DELETE FROM orders_order WHERE id = %s", order)
    return {(str(order), ""): "ORPHAN"}


def sent_twice(shop: Shop, order: int, _: int) -> Findings:
    shop.emit("order.paid", str(order), json.dumps(shop.body(order)).encode(), place_of(order) + 40 * MINUTE)
    return {(str(order), ""): "DUPLICATE"}


def bodies_exchanged(shop: Shop, order: int, other: int) -> Findings:
    mine, others = shop.body(order), shop.body(other)
    shop.rewrite(order, others)
    shop.rewrite(other, mine)
    # The effects belong to the rows, so they differ from the messages.
    wrong = {"": "MISMATCH"}
    if mine["customer"] != others["customer"]:
        wrong["points"] = "WRONG_EFFECT"
    if mine["total"] != others["total"]:
        wrong["refunds"] = "WRONG_SUM"
    return {(str(number), group): kind for number in (order, other) for group, kind in wrong.items()}


def a_cent_from_one_order_to_another(shop: Shop, order: int, other: int) -> Findings:
    for number, cent in ((order, "0.01"), (other, "-0.01")):
        body = shop.body(number)
        shop.rewrite(number, {**body, "total": str(Decimal(body["total"]) + Decimal(cent))})
    wrong = {"": "MISMATCH", "refunds": "WRONG_SUM"}
    return {(str(number), group): kind for number in (order, other) for group, kind in wrong.items()}


def row_edited_after_the_message(shop: Shop, order: int, _: int) -> Findings:
    shop.in_app("UPDATE orders_order SET customer = customer || ' ' WHERE id = %s", order)
    return {(str(order), ""): "MISMATCH"}


def a_time_that_lost_its_offset(shop: Shop, order: int, _: int) -> Findings:
    shop.rewrite(order, {**shop.body(order), "paid_at": (place_of(order) + 120 * MINUTE).isoformat()})
    return {(str(order), ""): "MISMATCH"}


def a_microsecond(shop: Shop, order: int, _: int) -> Findings:
    shop.rewrite(order, {**shop.body(order), "paid_at": (place_of(order) + timedelta(microseconds=1)).isoformat()})
    return {(str(order), ""): "MISMATCH"}


def torn(shop: Shop, order: int, _: int) -> Findings:
    shop.rewrite(order, json.dumps(shop.body(order)).encode()[:-20])
    return {(str(order), ""): "UNREADABLE"}


def decided_after_the_limit(shop: Shop, order: int, _: int) -> Findings:
    shop.in_broker(
        "UPDATE op_log SET decided_at = %s WHERE log_ids[1] = (SELECT log_id FROM commit_log WHERE key = %s)",
        place_of(order) + 5 * MINUTE + timedelta(milliseconds=1), str(order),
    )  # fmt: skip
    return {(str(order), ""): "LATE"}


def shipped_twice(shop: Shop, order: int, _: int) -> Findings:
    shop.effect("logistics", order, place_of(order) + timedelta(seconds=1))
    return {(str(order), "logistics"): "DUPLICATE"}


def shipped_for_another_order(shop: Shop, order: int, other: int) -> Findings:
    shop.in_app("UPDATE logistics_shipment SET order_id = %s WHERE order_id = %s", other, order)
    return {(str(order), "logistics"): "UNDELIVERED", (str(other), "logistics"): "DUPLICATE"}


def shipped_for_no_order(shop: Shop, order: int, _: int) -> Findings:
    shop.effect("logistics", order * 1_000_000 + 2, place_of(order))
    return {(f"{order * 1_000_000 + 2}", "logistics"): "ORPHAN"}


def shipped_before_its_row(shop: Shop, order: int, _: int) -> Findings:
    shop.in_app("UPDATE logistics_shipment SET created_at = %s WHERE order_id = %s", place_of(order) - MINUTE, order)
    return {(str(order), "logistics"): "EARLY"}


def shipped_after_the_limit(shop: Shop, order: int, _: int) -> Findings:
    late = place_of(order) + 10 * MINUTE + timedelta(milliseconds=1)
    shop.in_app("UPDATE logistics_shipment SET created_at = %s WHERE order_id = %s", late, order)
    return {(str(order), "logistics"): "LATE"}


def given_up(shop: Shop, order: int, _: int) -> Findings:
    shop.in_app("DELETE FROM logistics_shipment WHERE order_id = %s", order)
    (log_id,) = shop.broker.execute("SELECT log_id FROM commit_log WHERE key = %s", [str(order)]).fetchone() or ()
    shop.kill_letter("logistics", log_id, place_of(order) + MINUTE)
    return {(str(order), "logistics"): "DEAD"}


def points_for_another_customer(shop: Shop, order: int, _: int) -> Findings:
    shop.in_app("UPDATE points_entry SET customer = 'Customer ' || %s WHERE order_id = %s", order % 7, order)
    return {(str(order), "points"): "WRONG_EFFECT"}


def one_part_of_a_refund_is_missing(shop: Shop, order: int, _: int) -> Findings:
    shop.in_app("DELETE FROM refund WHERE order_id = %s AND total = 0.2", order)
    return {(str(order), "refunds"): "WRONG_SUM"}


def a_cent_too_much_is_refunded(shop: Shop, order: int, _: int) -> Findings:
    shop.app.execute("INSERT INTO refund VALUES (%s, 0.01, %s)", [order, place_of(order) + MINUTE])
    return {(str(order), "refunds"): "WRONG_SUM"}


def everything_at_once(shop: Shop, order: int, _: int) -> Findings:
    """One finding for the message, one for each group."""
    return {
        **a_time_that_lost_its_offset(shop, order, order),
        **sent_twice(shop, order, order),
        **one_part_of_a_refund_is_missing(shop, order, order),
        **shipped_before_its_row(shop, order, order),
    }


# ---- What only looks like a fault.


def a_second_message_rolled_back(shop: Shop, order: int, _: int) -> Findings:
    body = json.dumps({**shop.body(order), "total": "0.01"}).encode()
    shop.emit("order.paid", str(order), body, place_of(order) + MINUTE, decision="R")
    return {}


def an_equal_message_in_another_topic(shop: Shop, order: int, _: int) -> Findings:
    shop.emit("elsewhere", str(order), json.dumps(shop.body(order)).encode(), place_of(order))
    return {}


def written_in_another_way(shop: Shop, order: int, _: int) -> Findings:
    """Other white space, order, escapes, number and offset; the same values."""
    body = shop.body(order)
    local = (place_of(order) + timedelta(hours=5, minutes=45)).replace(tzinfo=None).isoformat()
    text = (
        f'\r\n{{"paid_at" : "{local}+05:45","\\u0074otal":\t{Decimal(body["total"]) * 1000}e-3 ,'
        f'"customer":"\\u0063ustomer {order % 7}"}}\n'
    )
    shop.rewrite(order, text.encode())
    return {}


def effects_on_their_limits(shop: Shop, order: int, _: int) -> Findings:
    shop.in_app(
        "UPDATE logistics_shipment SET created_at = %s WHERE order_id = %s", place_of(order) + 10 * MINUTE, order
    )
    shop.in_app("UPDATE points_entry SET created_at = %s WHERE order_id = %s", place_of(order) - MINUTE / 2, order)
    return {}


def a_refund_in_parts_that_cancel(shop: Shop, order: int, _: int) -> Findings:
    for part in ("7.77", "-7.77"):
        shop.app.execute("INSERT INTO refund VALUES (%s, %s, %s)", [order, part, place_of(order) + MINUTE])
    return {}


PLANTS: tuple[Plant, ...] = (
    message_removed,
    rolled_back_although_the_row_is_there,
    sent_to_another_topic,
    never_decided,
    invented,
    order_was_never_paid,
    row_rolled_back_after_the_message,
    sent_twice,
    bodies_exchanged,
    a_cent_from_one_order_to_another,
    row_edited_after_the_message,
    a_time_that_lost_its_offset,
    a_microsecond,
    torn,
    decided_after_the_limit,
    shipped_twice,
    shipped_for_another_order,
    shipped_for_no_order,
    shipped_before_its_row,
    shipped_after_the_limit,
    given_up,
    points_for_another_customer,
    one_part_of_a_refund_is_missing,
    a_cent_too_much_is_refunded,
    everything_at_once,
    a_second_message_rolled_back,
    an_equal_message_in_another_topic,
    written_in_another_way,
    effects_on_their_limits,
    a_refund_in_parts_that_cancel,
)


def plant_machines(shop: Shop, chance: random.Random) -> Findings:
    """The order of one key: a row must agree with the message that was committed last."""
    at = [place_of(chance.randrange(1, ORDERS)) for _ in range(5)]
    shop.move("overtaken", at[0], (1, 3, 2))
    shop.move("last move lost", at[1], (1, 2))
    shop.move("set back", at[2], row=2)
    shop.move("silent", at[3], ())
    # Stored first, committed last.
    shop.move("overtaking in the log", at[4], ())
    for level, after in ((3, 3), (2, 2), (1, 1)):
        body = json.dumps({"level": level}).encode()
        shop.emit("machine.moved", "overtaking in the log", body, at[4], after=timedelta(seconds=after))
    return {
        ("overtaken", ""): "MISMATCH",
        ("last move lost", ""): "MISMATCH",
        ("set back", ""): "MISMATCH",
        ("silent", ""): "LOST",
    }


# ---- Rare values.


@dataclass(kw_only=True)
class Parcel:
    """A parcel's row, and its message's body: `raw` has JSON texts in place of the row's values, None leaves the field
    out, `more` follows them. `whole` is the body instead."""

    code: str
    row: dict[str, Any] = field(default_factory=dict)
    raw: dict[str, str | None] = field(default_factory=dict)
    more: str = ""
    whole: bytes | None = None
    found: str = ""
    in_parquet: bool = True
    has_message: bool = True

    def values(self, at: datetime) -> dict[str, Any]:
        """The columns of the row."""
        usual = {
            "note": "plain", "weight": "1.5", "seq": 7, "sealed": True, "sent_on": "2025-06-01",
            "seen": "2025-06-01T12:00:00.123456+00:00", "ref": str(uuid.uuid5(uuid.NAMESPACE_OID, self.code)),
        }  # fmt: skip
        return {**usual, **self.row, "code": self.code, "packed_at": at.isoformat()}

    def body(self, at: datetime) -> bytes:
        """The body of the message."""
        if self.whole is not None:
            return self.whole
        texts = {**{name: json.dumps(value) for name, value in self.values(at).items()}, **self.raw}
        pairs = [f"{json.dumps(name)}: {text}" for name, text in texts.items() if text is not None]
        return ("{" + ", ".join(pairs) + self.more + "}").encode("utf-8", "surrogatepass")


LONG = "x" * 100_000
NESTED = ', "more": ' + "[" * 1_200 + "]" * 1_200
DIGITS = "9" * 1_500

HOSTILE_KEYS = (
    " leading", "trailing ", "two  spaces", "line\nbreak", "carriage\r\nreturn", "tab\tstop", 'double "quotes"',
    "single 'quote", "back\\slash", "\\u0000", "\\N", "NULL", "null", "%", "%s {} $1", "a,b;c|d", "<b>&amp;</b>",
    "emoji 👩‍👩‍👧", "\u202eright to left", "zero\u200bwidth", "é", "e\u0301", "ß", "SS", "İ", "007", "7", "7.0", "1e3",
    "-0", "NaN", "true", "{}", '{"a": 1}', "\ufeffmark", "\u2028", "\x7f", "\x01", "😀" * 255, "k" * 254 + "a",
    "../../etc", "s3a://x/y", "day=2025", "__HIVE_DEFAULT_PARTITION__", "--", "'; DROP TABLE parcel; --",
)  # fmt: skip
# Each is equal to a key above for a careless reader; its message is missing.
SIMILAR_KEYS = ("leading", "trailing", "two spaces", "Null", "é ", "ss", "i̇", "07", "-0.0", "k" * 254 + "b", "")

PARCELS_TO_PLANT = (
    *(Parcel(code=key) for key in HOSTILE_KEYS),
    *(Parcel(code=key, has_message=False, found="LOST") for key in SIMILAR_KEYS),
    # Empty and null.
    Parcel(code="empty", row={"note": ""}),
    Parcel(code="both null", row={"note": None}),
    Parcel(code="null and left out", row={"note": None}, raw={"note": None}),
    Parcel(code="null and empty", row={"note": None}, raw={"note": '""'}, found="MISMATCH"),
    Parcel(code="empty and null", row={"note": ""}, raw={"note": "null"}, found="MISMATCH"),
    Parcel(code="empty and left out", row={"note": ""}, raw={"note": None}, found="MISMATCH"),
    Parcel(code="the word and null", row={"note": "null"}, raw={"note": "null"}, found="MISMATCH"),
    Parcel(code="null and the word", row={"note": None}, raw={"note": '"null"'}, found="MISMATCH"),
    Parcel(code="the word", row={"note": "null"}),
    Parcel(code="all null", row=dict.fromkeys(("weight", "seq", "sealed", "sent_on", "seen", "ref"))),
    Parcel(code="zero and null", row={"weight": "0"}, raw={"weight": "null"}, found="MISMATCH"),
    Parcel(code="false and null", row={"sealed": False}, raw={"sealed": "null"}, found="MISMATCH"),
    # Texts.
    Parcel(code="NUL behind", row={"note": "a"}, raw={"note": r'"a\u0000"'}, found="MISMATCH"),
    Parcel(code="NUL written out", row={"note": r"a\u0000"}),
    Parcel(code="NUL elsewhere", more=r', "more": "\u0000"'),
    Parcel(code="NUL in a name", more=r', "note\u0000": "x"'),
    Parcel(code="surrogate elsewhere", more=r', "more": "\ud800"'),
    Parcel(code="surrogate and ?", row={"note": "?"}, raw={"note": r'"\ud83d"'}, found="UNREADABLE"),
    Parcel(code="surrogate and U+FFFD", row={"note": "\ufffd"}, raw={"note": r'"\udc00"'}, found="UNREADABLE"),
    Parcel(code="surrogate pair", row={"note": "😀"}, raw={"note": r'"\ud83d\ude00"'}),
    Parcel(code="another form of é", row={"note": "é"}, raw={"note": '"e\u0301"'}, found="MISMATCH"),
    Parcel(code="another case", row={"note": "a"}, raw={"note": '"A"'}, found="MISMATCH"),
    Parcel(code="a space behind", row={"note": "a"}, raw={"note": '"a "'}, found="MISMATCH"),
    Parcel(code="another line end", row={"note": "a\r\nb"}, raw={"note": r'"a\nb"'}, found="MISMATCH"),
    Parcel(code="very long", row={"note": LONG + "y"}),
    Parcel(code="very long, other end", row={"note": LONG + "y"}, raw={"note": f'"{LONG}z"'}, found="MISMATCH"),
    Parcel(code="a number as text", row={"note": "1"}, raw={"note": "1"}),
    Parcel(code="a truth as text", row={"note": "true"}, raw={"note": "true"}),
    Parcel(code="a JSON text as text", row={"note": '"x"'}, raw={"note": '"x"'}, found="MISMATCH"),
    # Numbers.
    Parcel(code="trailing zeros", row={"weight": "12.5"}, raw={"weight": '"12.50000000000000000000"'}),
    Parcel(code="trailing zeros of a number", row={"weight": "12.500"}, raw={"weight": "12.50"}),
    Parcel(code="negative zero", row={"weight": "0"}, raw={"weight": "-0.0"}),
    Parcel(code="below 12 decimals", row={"weight": "1e-15"}, raw={"weight": "2e-15"}),
    Parcel(code="the 12th decimal", row={"weight": "1e-12"}, raw={"weight": "2e-12"}, found="MISMATCH"),
    Parcel(code="26 and 12", row={"weight": "9" * 26 + "." + "9" * 12}),
    Parcel(
        code="26 and 12, other end",
        row={"weight": "9" * 26 + "." + "9" * 12},
        raw={"weight": "9" * 26 + "." + "9" * 11 + "8"},
        found="MISMATCH",
    ),
    Parcel(code="beyond a double", row={"seq": 9_007_199_254_740_993}),
    Parcel(
        code="beyond a double, other end",
        row={"seq": 9_007_199_254_740_993},
        raw={"seq": "9007199254740992"},
        found="MISMATCH",
    ),
    Parcel(code="0.1 + 0.2", row={"weight": "0.3"}, raw={"weight": "0.30000000000000004"}),
    Parcel(code="an integer with a point", row={"seq": 7}, raw={"seq": "7.0"}),
    Parcel(code="half an integer", row={"seq": 7}, raw={"seq": "7.5"}, found="MISMATCH"),
    Parcel(code="1,500 digits", raw={"weight": DIGITS}, found="UNREADABLE"),
    Parcel(code="1,500 digits elsewhere", more=f', "more": {DIGITS}'),
    Parcel(code="not a number", row={"weight": "NaN"}, raw={"weight": '"NaN"'}, in_parquet=False),
    Parcel(
        code="not a number and null", row={"weight": "NaN"}, raw={"weight": "null"}, found="MISMATCH", in_parquet=False
    ),
    Parcel(code="not a number and 0", row={"weight": "0"}, raw={"weight": '"NaN"'}, found="MISMATCH"),
    Parcel(code="infinite", row={"weight": "Infinity"}, raw={"weight": '"Infinity"'}, in_parquet=False),
    Parcel(
        code="infinite, other sign",
        row={"weight": "Infinity"},
        raw={"weight": '"-Infinity"'},
        found="MISMATCH",
        in_parquet=False,
    ),
    Parcel(code="bare NaN", raw={"weight": "NaN"}, found="UNREADABLE"),
    # Truths.
    Parcel(code="another truth", raw={"sealed": "false"}, found="MISMATCH"),
    # Dates and times.
    Parcel(code="a day later in UTC", raw={"sent_on": '"2025-06-01T23:30:00-02:00"'}, found="MISMATCH"),
    Parcel(code="a day earlier in UTC", raw={"sent_on": '"2025-06-02T00:30:00+02:00"'}),
    Parcel(code="date line", raw={"sent_on": '"2025-06-02T13:59:59.999999+14:00"'}),
    Parcel(code="leap day", row={"sent_on": "2024-02-29"}),
    Parcel(code="no leap day", row={"sent_on": "2025-03-01"}, raw={"sent_on": '"2025-02-29"'}, found="UNREADABLE"),
    Parcel(code="first day", row={"sent_on": "0001-01-01"}),
    Parcel(code="last day", row={"sent_on": "9999-12-31"}),
    Parcel(code="a day that one calendar skips", row={"sent_on": "1582-10-10"}),
    Parcel(code="first time", row={"seen": "0001-01-01T00:00:00+00:00"}),
    Parcel(code="old time", row={"seen": "1582-10-10T00:00:00+00:00"}),
    Parcel(code="last time", row={"seen": "9999-12-31T23:59:59.999999+00:00"}),
    Parcel(
        code="repeated hour", row={"seen": "2025-10-26T00:30:00+00:00"}, raw={"seen": '"2025-10-26T02:30:00+02:00"'}
    ),
    Parcel(
        code="repeated hour, second time",
        row={"seen": "2025-10-26T00:30:00+00:00"},
        raw={"seen": '"2025-10-26T02:30:00+01:00"'},
        found="MISMATCH",
    ),
    Parcel(code="another microsecond", raw={"seen": '"2025-06-01T12:00:00.123457Z"'}, found="MISMATCH"),
    # Names of fields.
    Parcel(code="name twice", row={"note": "last"}, raw={"note": '"first"'}, more=', "note": "last"'),
    Parcel(code="name twice, first", row={"note": "first"}, more=', "note": "last"', found="MISMATCH"),
    Parcel(code="name twice, last is null", row={"note": "first"}, more=', "note": null', found="MISMATCH"),
    Parcel(code="name in capitals", row={"note": "x"}, more=', "NOTE": "y"'),
    Parcel(code="only in capitals", row={"note": "x"}, raw={"note": None}, more=', "NOTE": "x"', found="MISMATCH"),
    Parcel(code="name in escapes", row={"note": "x"}, raw={"note": None}, more=r', "no\u0074e": "x"'),
    Parcel(code="odd names", more=r', "": 1, "a.b": 2, "$": 3, "[0]": 4, "\n\"\\😀": {"note": "y"}'),
    Parcel(
        code="one level down", row={"note": "x"}, raw={"note": None}, more=', "more": {"note": "x"}', found="MISMATCH"
    ),
    Parcel(code="an object in its place", row={"note": "x"}, raw={"note": '{"note": "x"}'}, found="MISMATCH"),
    Parcel(
        code="ref in capitals",
        row={"ref": "0a0b0c0d-0000-4000-8000-00000000000e"},
        raw={"ref": '"0A0B0C0D-0000-4000-8000-00000000000E"'},
    ),
    # Whole bodies.
    Parcel(code="1,200 levels", more=NESTED),
    Parcel(code="no body", whole=b"", found="UNREADABLE"),
    Parcel(code="white space", whole=b" \n", found="UNREADABLE"),
    Parcel(code="null body", whole=b"null", found="UNREADABLE"),
    Parcel(code="list", whole=b"[]", found="UNREADABLE"),
    Parcel(code="not UTF-8", row={"note": "\ufffd"}, whole=b'{"note": "\xed\xa0\x80"}', found="UNREADABLE"),
)


# Bodies that a lenient parser reads, with the right values: no handler can decode them.
LENIENT: dict[str, Callable[[str], str]] = {
    "single quotes": lambda text: text.replace('"', "'"),
    "no quotes around names": lambda text: text.replace('"note"', "note"),
    "comment": lambda text: text.replace("{", "{ /* packed */ ", 1),
    "something behind": lambda text: text + " x",
    "two values": lambda text: text + text,
    "comma at the end": lambda text: text[:-1] + ",}",
    "leading zero": lambda text: text.replace(": 7", ": 007"),
    "line break in a text": lambda text: text.replace("plain", "pl\nain"),
    "plus sign": lambda text: text.replace(": 7", ": +7"),
    "no end": lambda text: text[:-1],
}


def lenient_bodies(at: datetime) -> Iterator[Parcel]:
    for code, change in LENIENT.items():
        yield Parcel(code=code, whole=change(Parcel(code=code).body(at).decode()).encode(), found="UNREADABLE")


def plant_parcels(shop: Shop, chance: random.Random, source: str) -> Findings:
    """All rare values among parcels as they should be."""
    usual = [Parcel(code=f"parcel {number}") for number in range(PARCELS)]
    at = place_of(chance.randrange(1, ORDERS))
    parcels = [*usual, *PARCELS_TO_PLANT, *lenient_bodies(at)]
    chance.shuffle(parcels)
    found: Findings = {}
    for parcel in parcels:
        if source == "parquet" and not parcel.in_parquet:
            continue
        packed = at if parcel.whole is not None else place_of(chance.randrange(1, ORDERS))
        row = parcel.values(packed)
        shop.app.execute(
            f"INSERT INTO parcel ({', '.join(row)}) VALUES ({', '.join(['%s'] * len(row))})", list(row.values())
        )
        if parcel.has_message:
            shop.emit("parcel.packed", parcel.code, parcel.body(packed), packed)
        if parcel.found:
            found[parcel.code, ""] = parcel.found
    return found


def plant(shop: Shop, seed: int, source: str) -> Findings:
    """Everything; returns the findings that must follow."""
    chance = random.Random(seed)
    orders = chance.sample(range(100, ORDERS - 100), 2 * len(PLANTS))
    found: Findings = {}
    for each in chance.sample(PLANTS, len(PLANTS)):
        found.update(each(shop, orders.pop(), orders.pop()))
    return {**found, **plant_machines(shop, chance), **plant_parcels(shop, chance, source)}


# ---- Sources.


def export(shop: Shop, folder: Path) -> None:
    """All tables and views as Parquet, numbers as decimals."""
    folder.mkdir()
    for table in (*TABLES, "refund", "machine"):
        export_parquet(shop.app, table, folder / f"{table}.parquet")
    for view in VIEWS:
        export_parquet(shop.broker, view, folder / f"{view}.parquet")
    rows = shop.app.execute(
        "SELECT code, note, weight::numeric(38,12), seq, sealed, sent_on, seen, ref::text, packed_at FROM parcel"
    ).fetchall()
    time = pa.timestamp("us", tz="UTC")
    kinds = {
        "code": pa.string(), "note": pa.string(), "weight": pa.decimal128(38, 12), "seq": pa.decimal128(30, 0),
        "sealed": pa.bool_(), "sent_on": pa.date32(), "seen": time, "ref": pa.string(), "packed_at": time,
    }  # fmt: skip
    columns = [pa.array(column, kind) for column, kind in zip(zip(*rows, strict=True), kinds.values(), strict=True)]
    pq.write_table(pa.table(columns, list(kinds)), folder / "parcel.parquet")


def rules_of(source: str, folder: Path) -> str:
    """The three rules over one source."""
    groups = group_rules(("logistics", "points")) + 'compare_effect = {customer = "customer"}\n'
    text = RULES.format(extra="", groups=groups) + MORE_RULES
    if source == "parquet":
        files = f'kind = "parquet"\npath = "{folder}"\nwatermark = "2025-07-01T00:00:00Z"'
        text = text.replace('env = "RECONCILE_APP"', files)
        text = text.replace('env = "RECONCILE_BROKER"\nschema = "outbox"', files)
    return text


@pytest.fixture
def shop(new_database: Callable[..., str], shop_template: str, broker_url: str) -> Iterator[Shop]:
    """A shop with correct pairs only."""
    made = Shop(new_database(template=shop_template), broker_url)
    made.fill()
    yield made
    made.close()


def assert_exactly(reconcile: Reconciler, result: Mapping[str, Any], expected: Findings) -> None:
    """The findings are the expected ones: none is missing, none is more, none has another class."""
    rows = [((row["key"], row["group"]), row["class"], row["detail"]) for row in reconcile.rows(result)]
    others = [(*row, expected.get(row[0])) for row in rows if expected.get(row[0]) != row[1]]
    missing = {subject: kind for subject, kind in expected.items() if subject not in {row[0] for row in rows}}
    assert (others, missing, len(rows)) == ([], {}, len(expected)), f"others: {others}\nmissing: {missing}"


@pytest.mark.slow
@pytest.mark.parametrize(("source", "seed"), [("postgres", 20_260_101), ("parquet", 1582)])
def test_exactly_the_plants_are_found(
    spark_session: SparkSession,
    shop: Shop,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    source: str,
    seed: int,
) -> None:
    for name, value in shop.environment.items():
        monkeypatch.setenv(name, value)
    expected = plant(shop, seed, source)
    if source == "parquet":
        export(shop, tmp_path / "files")
    rules = tmp_path / "reconcile.toml"
    rules.write_text(rules_of(source, tmp_path / "files"), encoding="utf-8")
    reconcile = Reconciler(spark_session, shop, tmp_path)
    result = reconcile.run(rules=rules)
    assert_exactly(reconcile, result, expected)
