"""Histories over time, as exports to Parquet: an export has only the events up to its moment."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from decimal import Decimal
from pathlib import Path
from random import Random

import pyarrow as pa
import pyarrow.parquet as pq

from spark.sources import contract
from tests.spark.exports import TIME, TYPES
from tests.spark.oracle import GRACE, GROUPS, UNTIL, BusinessRow, History, Sent

HOUR = timedelta(hours=1)
BEGIN = UNTIL - 6 * HOUR
TOPIC, OTHER_TOPIC = "order.paid", "order.shipped"
_STATES = ("committed", "committed", "committed", "committed", "committed", "parked", "undecided", "rolled_back")


@dataclass(frozen=True, kw_only=True)
class Fact:
    """A message with the times of its events; `handled`: when the group that keeps message ids worked on it."""

    sent: Sent
    message_id: str
    topic: str = TOPIC
    recalled_at: datetime | None = None
    handled: tuple[datetime, ...] = ()

    def at(self, now: datetime) -> Sent | None:
        """As it is seen at a moment."""
        if self.sent.stored_at >= now:
            return None
        if self.sent.decided_at is not None and self.sent.decided_at >= now:
            return replace(self.sent, state="undecided", decided_at=None)
        if self.recalled_at is not None and self.recalled_at < now:
            return replace(self.sent, state="recalled")
        return self.sent


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """Everything that will have happened with one key. `dead`: when each group gave its first message up."""

    rows: tuple[BusinessRow, ...] = ()
    facts: tuple[Fact, ...] = ()
    effects: tuple[datetime, ...] = ()
    dead: tuple[datetime | None, ...] = (None, None)

    def at(self, now: datetime) -> History:
        """The key's history up to a moment, for the oracle."""
        ours = [(fact, sent) for fact in self.facts if fact.topic == TOPIC and (sent := fact.at(now)) is not None]
        is_sent = any(sent.is_committed for _, sent in ours)
        handled = tuple(at for fact, _ in ours for at in fact.handled if at < now)
        return History(
            rows=tuple(row for row in self.rows if row.at < now),
            messages=tuple(sent for _, sent in ours),
            effects=(tuple(at for at in self.effects if at < now), handled),
            dead=tuple(is_sent and at is not None and at < now for at in self.dead),
        )


def random_timeline(random: Random) -> Timeline:
    """Mostly as it should be, then disturbed; the moments are spread over six hours."""
    start = BEGIN + random.random() * (6 * HOUR + 2 * GRACE)

    def after(moment: datetime) -> datetime:
        return moment + random.choice((timedelta(seconds=1), timedelta(seconds=50), HOUR / 8, HOUR)) * random.random()

    def fact(stored: datetime, topic: str = TOPIC) -> Fact:
        state = random.choice(_STATES)
        decided = after(stored) if state in ("committed", "rolled_back") else None
        done = decided if state == "committed" else None
        handled = tuple(after(done) for _ in range(random.choice((0, 1, 1, 1, 1, 2)))) if done else ()
        return Fact(
            sent=Sent(
                stored_at=stored,
                state=state,
                decided_at=decided,
                total=Decimal(random.choice(("12.50", "12.50", "12.50", "9"))),
                damage=random.choice((None, None, None, None, None, b"{")),
            ),
            message_id=_message_id(random, stored),
            topic=topic,
            recalled_at=after(done) if done and random.random() < 0.1 else None,
            handled=handled,
        )

    facts = [fact(start)] if random.random() < 0.9 else []
    if random.random() < 0.25:
        facts.append(fact(after(after(start))))
    if random.random() < 0.1:
        facts.append(fact(start, OTHER_TOPIC))
    # In the order of the log, which is the order in which they are stored.
    rows = [BusinessRow(at=after(start))] if random.random() < 0.9 else []
    if random.random() < 0.05:
        rows.append(BusinessRow(at=after(after(start))))
    return Timeline(
        rows=tuple(rows),
        facts=tuple(sorted(facts, key=lambda each: each.sent.stored_at)),
        effects=tuple(after(start) for _ in range(random.choice((0, 1, 1, 1, 1, 2)))),
        dead=tuple(after(start) if random.random() < 0.05 else None for _ in GROUPS),
    )


def _message_id(random: Random, at: datetime) -> str:
    """UUID version 7."""
    digits = f"{int(at.timestamp() * 1000):012x}7{random.getrandbits(76):019x}"
    return f"{digits[:8]}-{digits[8:12]}-{digits[12:16]}-{digits[16:20]}-{digits[20:]}"


def export(timelines: Mapping[str, Timeline], strays: Mapping[str, datetime], now: datetime, folder: Path) -> None:
    """Everything as it is at a moment, one Parquet file per table. `strays`: handled ids of no message."""
    known = {key: timeline.at(now) for key, timeline in timelines.items()}
    messages: list[dict[str, object]] = []
    dead: list[dict[str, object]] = []
    inbox = [{"message_id": name, "handled_at": at} for name, at in strays.items() if at < now]
    for key, timeline in timelines.items():
        for fact in timeline.facts:
            sent = fact.at(now)
            if sent is None:
                continue
            messages.append(
                {
                    "message_id": fact.message_id,
                    "transaction_id": fact.message_id,
                    "log_id": len(messages) + 1,
                    "topic": fact.topic,
                    "key": key,
                    "tag": "",
                    "content_type": "application/json",
                    "body": sent.body,
                    "stored_at": sent.stored_at,
                    "state": sent.state,
                    "decided_at": sent.decided_at,
                }
            )
            inbox += [{"message_id": fact.message_id, "handled_at": at} for at in fact.handled if at < now]
        for group, is_dead, at in zip(GROUPS, known[key].dead, timeline.dead, strict=True):
            if is_dead:
                dead.append({"consumer_group": group, "topic": TOPIC, "key": key, "dead_at": at, "log_id": 1})
    rows = [
        {"id": key, "customer": row.customer, "total": str(row.total), "weight": str(row.weight), "paid_at": row.at}
        for key, history in known.items()
        for row in history.rows
    ]
    effects = [{"k": key, "t": at} for key, history in known.items() for at in history.effects[0]]
    views = {"message_v1": messages, "dead_letter_v1": dead, "timed_out_v1": [], "delivery_v1": []}
    for view, listed in views.items():
        columns = [(name, TYPES.get(kind, pa.string())) for name, kind in contract.VIEWS[view].items()]
        pq.write_table(pa.Table.from_pylist(listed, pa.schema(columns)), folder / f"{view}.parquet")
    texts = [(name, pa.string()) for name in ("id", "customer", "total", "weight")]
    pq.write_table(pa.Table.from_pylist(rows, pa.schema([*texts, ("paid_at", TIME)])), folder / "orders_order.parquet")
    pq.write_table(pa.Table.from_pylist(effects, pa.schema([("k", pa.string()), ("t", TIME)])), folder / "work.parquet")
    shape = pa.schema([("message_id", pa.string()), ("handled_at", TIME)])
    pq.write_table(pa.Table.from_pylist(inbox, shape), folder / "inbox.parquet")
