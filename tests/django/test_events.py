"""Typed events in Django: publishing, handlers, and the refusals of both (decision 251)."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import pytest
from django.core.management import CommandError, call_command
from django.db import transaction

from outbox import Delivery
from outbox.broker.database.executor import Executor
from outbox.contrib.django import (
    ClaimedDelivery,
    message,
    publish,
    publish_many,
    publish_messages,
    subscriber,
    transactional_message,
)
from outbox.contrib.django.worker.drain import drain
from outbox.contrib.events import waiting
from outbox.errors import ConfigurationError, InvalidSubscription, UnserialisableBody, UsageError
from outbox.events import UnknownEventVersion, declaration, event, upcast
from tests.django.sessions import broker_connection


@dataclass(frozen=True)
class Line:
    sku: str
    price: Decimal


@event("order.placed", version=2, topic="orders", key="number", tag=lambda one: one.kind)
@dataclass(frozen=True)
class Ordered:
    number: int
    lines: list[Line]
    kind: str = "web"


@upcast("order.placed", 1)
def with_lines(body: dict[str, Any]) -> dict[str, Any]:
    return {"number": body["id"], "lines": [{"sku": body["sku"], "price": "0"}]}


FIRST = Ordered(1, [Line("a", Decimal("2.50"))])


@pytest.fixture(autouse=True)
def declared(no_subscribers: None) -> Iterator[None]:
    with declaration.restored():
        yield


def record(group: str = "typed") -> list[Ordered]:
    seen: list[Ordered] = []

    @subscriber("orders", group=group)
    def handle(delivery: Delivery[Ordered]) -> None:
        seen.append(delivery.body)

    return seen


def test_an_event_is_published_and_handled_on_both_paths(path: str, databases: None) -> None:
    seen = record()
    plain: list[tuple[Any, ...]] = []

    @subscriber("orders", group="plain")
    def handle(delivery: Delivery) -> None:
        headers = dict(delivery.headers)
        plain.append((delivery.key, delivery.tag, headers.pop("outbox-event-version", ""), headers, delivery.body))

    with transaction.atomic():
        publish(FIRST)
        publish("orders", {"id": 2, "sku": "b"})
        publish(Ordered(3, []), key="three", tag="shop", headers={"origin": "test"})
    drain()
    assert sorted(seen, key=lambda one: one.number) == [FIRST, Ordered(2, [Line("b", Decimal(0))]), Ordered(3, [])]
    name = {"outbox-event": "order.placed"}
    assert sorted(plain, key=lambda one: one[0]) == [
        ("", "", "", {}, {"id": 2, "sku": "b"}),
        ("1", "web", "2", name, {"number": 1, "lines": [{"sku": "a", "price": "2.50"}], "kind": "web"}),
        ("three", "shop", "2", {"origin": "test", **name}, {"number": 3, "lines": [], "kind": "web"}),
    ]


def test_every_way_to_publish_takes_events(path: str, databases: None) -> None:
    seen = record()

    @transactional_message(Ordered, body=lambda number: Ordered(number, []))
    def order(number: int) -> None:
        pass

    with transaction.atomic():
        publish_many([Ordered(1, []), Ordered(2, [])])
        publish_messages([message(Ordered(3, []))])
    order(4)
    drain()
    assert sorted(one.number for one in seen) == [1, 2, 3, 4]


def test_a_handler_outside_and_a_batch_get_events(databases: None) -> None:
    outside: list[Ordered] = []
    batches: list[int] = []

    @subscriber(Ordered, group="outside", effects="outside")
    def charge(delivery: ClaimedDelivery[Ordered]) -> None:
        outside.append(delivery.body)

    @subscriber(Ordered, group="batch", batch=10)
    def handle(deliveries: list[Delivery[Ordered]]) -> None:
        batches.extend(one.body.number for one in deliveries)

    @subscriber(Ordered, group="async")
    async def later(delivery: Delivery) -> None:
        batches.append(-delivery.body.number)

    publish(FIRST, at_once=True)
    drain()
    assert (outside, sorted(batches)) == ([FIRST], [-1, 1])


def test_an_event_can_be_renamed_and_split(databases: None) -> None:
    @event("parcel.packed", topic="orders")
    @dataclass
    class Packed:
        parcel: int

    @event("invoice.due", topic="orders")
    @dataclass
    class Due:
        amount: Decimal

    upcast("order.placed", 2, to=("parcel.packed", 1))(lambda body: {"parcel": body["number"]})

    @upcast("order.placed", 2, to=("invoice.due", 1))
    def due(body: dict[str, Any]) -> dict[str, Any]:
        return {"amount": body["lines"][0]["price"]}

    parcels: list[Packed] = []
    amounts: list[Due] = []

    def pack(delivery: Any) -> None:
        parcels.append(delivery.body)

    def bill(delivery: Any) -> None:
        amounts.append(delivery.body)

    subscriber(Packed, group="packing")(pack)
    subscriber(Due, group="billing")(bill)
    publish(
        "orders",
        {"id": 7, "sku": "z"},
        headers={"outbox-event": "order.placed", "outbox-event-version": "1"},
        at_once=True,
    )
    publish(FIRST, at_once=True)
    drain()
    assert sorted(one.parcel for one in parcels) == [1, 7]
    assert sorted(one.amount for one in amounts) == [Decimal(0), Decimal("2.50")]


def test_what_readers_would_refuse_is_not_published(databases: None) -> None:
    with pytest.raises(UnserialisableBody, match=r"lines\.\[0\]\.price: expected a decimal number in text, got int 3"):
        publish(Ordered(1, [Line("a", 3)]))  # type: ignore[arg-type]


def test_a_wrong_call_is_refused(databases: None) -> None:
    unknown = "neither the name of a topic nor a value of a declared type.*write @event"
    wrong: list[tuple[Callable[[], object], str]] = [
        (lambda: publish(Line("a", Decimal(1))), unknown),
        (lambda: publish_many([Line("a", Decimal(1))]), unknown),
        (lambda: publish(FIRST, {"number": 1}), "passed together with a body"),
        (lambda: publish("orders"), "no body was passed"),
        (lambda: publish(FIRST, headers={"outbox-event": "x"}), "come from the type of the event"),
    ]
    for call, reason in wrong:
        with pytest.raises(UsageError, match=reason):
            call()


def test_a_wrong_declaration_is_refused() -> None:
    class Plain:
        pass

    @dataclass
    class Alike:
        value: str | UUID

    for kind, reason in ((Plain, "is not a type of events"), (Alike, "look alike in JSON")):
        with pytest.raises(ConfigurationError, match=reason):
            event("x")(kind)
    with pytest.raises(ConfigurationError, match="declared by"):
        event("order.placed", version=2)(Line)
    with pytest.raises(ConfigurationError, match="not a field of"):
        event("x", key="id")(Line)
    with pytest.raises(ConfigurationError, match="which is not an event"):

        @subscriber("orders", group="g")
        def handle(delivery: Delivery[Line]) -> None:
            pass

    def unknown(delivery: Delivery[Nowhere]) -> None:  # type: ignore[name-defined]  # noqa: F821
        pass

    with pytest.raises(InvalidSubscription, match="import its names at runtime"):
        subscriber("orders", group="g")(unknown)


# -- the contracts in CI ---------------------------------------------------------------------------


def test_the_command_refuses_what_breaks_a_reader(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "contracts"
    declaration.forget()

    @event("paid")
    @dataclass
    class Paid:
        number: int

    with pytest.raises(CommandError, match="not in the committed contracts") as refused:
        call_command("outbox_contract", "check", folder=folder)
    assert refused.value.returncode == 1
    call_command("outbox_contract", "write", folder=folder)
    call_command("outbox_contract", "check", folder=folder)
    declaration.forget()

    @event("paid")
    @dataclass
    class Changed:
        number: int
        currency: str

    for words in (("check",), ("write",)):
        with pytest.raises(CommandError, match=re.escape("field currency: new code cannot read what old code has")):
            call_command("outbox_contract", *words, folder=folder)
    call_command("outbox_contract", "write", "--force", folder=folder)
    call_command("outbox_contract", "check", folder=folder)
    assert (folder / "paid.json").exists() and "1 versions of events fit" in capsys.readouterr().out


# -- waiting for newer code -------------------------------------------------------------------------


def waiting_versions() -> list[tuple[str, int]]:
    """The versions that wait, as the consumers report them."""
    with broker_connection() as (connection, _):
        return connection.execute("SELECT event, version FROM outbox.unknown_version").fetchall()


def test_any_number_of_unknown_names_leaves_a_limited_number_of_rows(
    databases: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each publisher may write any name into the header."""
    versions, instance = waiting.UnknownVersions(), uuid4()

    def report(first: int) -> int:
        """Meet 300 names from the number `first` on, and return the number of rows."""
        names = [f"{number}{'n' * 4_000}" for number in range(first, first + 300)]
        versions.note([UnknownEventVersion("x" * 5_000, event=name, version=1) for name in names])
        with broker_connection() as (connection, schema):
            versions.report(Executor(connection, schema), instance, (1, 1))
        return len(waiting_versions())

    assert report(0) == 100
    assert report(300) == 100, "the first hundred keep their places while they may still wait"
    monkeypatch.setattr(waiting, "_FORGOTTEN_AFTER_SECONDS", 0)
    with broker_connection() as (connection, _):
        connection.execute("UPDATE outbox.unknown_version SET seen_at = seen_at - interval '11 minutes'")
    assert report(600) == 100, "the others make room"
    assert {len(name) for name, _ in waiting_versions()} == {200}
