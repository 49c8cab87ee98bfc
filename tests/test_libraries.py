"""What a small installation cannot run is left out by name, and the rest runs."""

from __future__ import annotations

from pathlib import Path

from tests import libraries

TESTS = Path(__file__).parent


def test_a_file_that_needs_a_missing_library_is_left_out_by_name() -> None:
    def without_spark(name: str) -> bool:
        return name != "pyspark"

    why = libraries.why_left_out(TESTS / "spark" / "test_files.py", TESTS, without_spark)
    assert why == "tests/spark/test_files.py needs pyspark, which `make install-all` installs"
    assert libraries.why_left_out(TESTS / "core" / "test_message.py", TESTS, lambda name: False) == ""
    assert libraries.why_left_out(TESTS / "spark", TESTS, lambda name: True) == ""


def test_each_place_exists() -> None:
    assert [place for places in libraries.NEEDED_BY.values() for place in places if not (TESTS / place).exists()] == []
