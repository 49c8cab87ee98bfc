"""Limits that PostgreSQL cannot hold are refused where they are declared."""

from __future__ import annotations

from typing import Any
from uuid import uuid4

import pytest

from outbox.contrib.limits import Limits, slots
from outbox.errors import ConfigurationError
from tests.broker.bench import ConsumptionBench


def test_a_number_that_the_tables_cannot_hold_is_refused() -> None:
    refused: list[tuple[dict[str, Any], str]] = [
        *(
            ({name: 2**31, "rate": "9/s"}, rf"{name}=2147483648.*2,147,483,647")
            for name in ("running", "per_key", "burst")
        ),
        ({"rate": "1000001/s"}, "1,000,000/s"),
        ({"rate": f"{'9' * 400}/s"}, "1,000,000/s"),
        ({"rate": "0.001/day"}, "366 days"),
        ({"rate": "1/day", "burst": 367}, "366 days"),
    ]
    for given, complaint in refused:
        with pytest.raises(ConfigurationError, match=complaint):
            Limits(**given)


def test_the_tables_hold_the_extremes(bench: ConsumptionBench) -> None:
    extremes = Limits(rate="1/day", burst=366), Limits(rate="1000000/s"), Limits(rate="1000000/s", burst=2**31 - 1)
    for number, limits in enumerate(extremes):
        assert limits.per_second is not None
        for _ in range(2):
            place = (number, 1)
            assert len(slots.take_tokens(bench.run, place, 1, per_second=limits.per_second, burst=limits.burst)) == 1
    taken = slots.take(bench.run, (1, 1), uuid4(), {"": 2}, limit=2**31 - 1, term_seconds=60)
    assert taken == {"": {1, 2}}
