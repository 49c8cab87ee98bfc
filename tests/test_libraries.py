"""What a small installation cannot run is left out by name, and the rest runs."""

from __future__ import annotations

from pathlib import Path

from tests import libraries

TESTS = Path(__file__).parent


def test_each_place_exists() -> None:
    assert [place for places in libraries.NEEDED_BY.values() for place in places if not (TESTS / place).exists()] == []
