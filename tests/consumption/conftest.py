from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.consumption.bench import ConsumptionBench


@pytest.fixture
def bench(broker_url: str) -> Iterator[ConsumptionBench]:
    """A fresh broker."""
    bench = ConsumptionBench(broker_url)
    yield bench
    bench.close()
