"""The apps of the parts that this tree has, for INSTALLED_APPS of the tests: all of them, or some by name."""

from __future__ import annotations

from pathlib import Path

import outbox.contrib


def part_apps(*only: str) -> list[str]:
    """Return the apps of the parts in the folder outbox/contrib, or of those named that are there."""
    [folder] = map(Path, outbox.contrib.__path__)
    there = [path.parent.name for path in sorted(folder.glob("*/apps.py")) if path.parent.name != "django"]
    return [f"outbox.contrib.{name}" for name in there if not only or name in only]
