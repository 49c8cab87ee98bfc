"""No fault point is there for nothing: each is armed by some test."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from outbox import faults

TESTS = Path(__file__).resolve().parent.parent
# These only try the arming itself.
OTHERS = {"test_faults.py", "test_fault_points.py"}


def _is_armed(point: str, text: str) -> bool:
    """Whether a test names the point, its whole family, or its family in a template and the step beside it."""
    family, step = point.split(".")
    if f'"{point}' in text or f'startswith("{family}.")' in text:
        return True
    return f"{family}.{{" in text and re.search(rf'"{step}["@]', text) is not None


@pytest.mark.parametrize("point", faults.POINTS)
def test_every_fault_point_is_armed_somewhere(point: str) -> None:
    texts = (path.read_text() for path in TESTS.rglob("*.py") if path.name not in OTHERS)
    assert any(_is_armed(point, text) for text in texts), f"no test arms {point}"
