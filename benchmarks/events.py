"""What a typed event costs against a dictionary: encoding and decoding one body, without a database.

    python -m benchmarks.events

Prints microseconds per message (the median of seven rounds), for a dictionary, a dataclass and a pydantic model with
the same fields and values.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, Final

import pydantic

from outbox.codec import JsonCodec
from outbox.events.declaration import event, find_event, read_event

MESSAGES: Final = 5_000
ROUNDS: Final = 7


@dataclass(frozen=True)
class Line:
    sku: str
    count: int


@event("bench.dataclass")
@dataclass(frozen=True)
class AsDataclass:
    order_id: int
    amount: Decimal
    currency: str
    customer: str
    lines: list[Line]


class ModelLine(pydantic.BaseModel):
    sku: str
    count: int


@event("bench.pydantic")
class AsModel(pydantic.BaseModel):
    order_id: int
    amount: Decimal
    currency: str
    customer: str
    lines: list[ModelLine]


def microseconds(call: Callable[[], object]) -> float:
    """Return the median time of one call, in microseconds."""
    found = []
    for _ in range(ROUNDS):
        started = time.perf_counter()
        for _ in range(MESSAGES):
            call()
        found.append((time.perf_counter() - started) / MESSAGES * 1e6)
    return statistics.median(found)


def typed(codec: JsonCodec, value: object, data: bytes) -> tuple[float, float]:
    """Return the microseconds to encode an event, and to decode it from `data`."""
    kind = type(value)
    declared = find_event(kind)
    assert declared is not None
    event_type, headers = declared, dict(declared.headers)

    def encode() -> bytes:
        return codec.encode(event_type.body_of(value))

    def decode(given: bytes = data) -> object:
        return read_event((kind,), event_type.topic, headers, codec.decode(given))

    assert decode(encode()) == value
    return microseconds(encode), microseconds(decode)


def main() -> None:
    """Measure and print."""
    codec = JsonCodec()
    fields: dict[str, Any] = {"order_id": 7, "amount": Decimal("12.50"), "currency": "EUR", "customer": "c" * 40}
    lines: list[dict[str, Any]] = [{"sku": "a-1", "count": 2}, {"sku": "b-2", "count": 1}]
    body = {**fields, "lines": lines}
    data = codec.encode(body)
    print(f"{len(data)} bytes, {MESSAGES} messages, {ROUNDS} rounds; microseconds per message")
    print(f"{'':12}{'encode':>8}{'decode':>8}")
    encode, decode = microseconds(lambda: codec.encode(body)), microseconds(lambda: codec.decode(data))
    print(f"{'dictionary':12}{encode:8.1f}{decode:8.1f}")
    for name, value in (
        ("dataclass", AsDataclass(**fields, lines=[Line(**one) for one in lines])),
        ("pydantic", AsModel(**fields, lines=[ModelLine(**one) for one in lines])),
    ):
        kind = type(value)
        declared = find_event(kind)
        assert declared is not None
        headers = dict(declared.headers)
        assert (
            read_event((kind,), declared.topic, headers, codec.decode(codec.encode(declared.body_of(value)))) == value
        )
        encode, decode = typed(codec, value, data)
        print(f"{name:12}{encode:8.1f}{decode:8.1f}")


if __name__ == "__main__":
    main()
