"""What this tree has: the apps of the parts, for INSTALLED_APPS of the tests, and the commands."""

from __future__ import annotations

from pathlib import Path

from django.core.management import get_commands

import outbox.contrib

# They measure each message from the moment they are installed, so the tests about them name them.
_MEASURING = ("prometheus", "opentelemetry")


def part_apps(*only: str) -> list[str]:
    """Return the apps of the parts in the folder outbox/contrib, or of those named that are there."""
    folder = _folder()
    there = [path.parent.name for path in sorted(folder.glob("*/apps.py")) if path.parent.name != "django"]
    return [f"outbox.contrib.{name}" for name in there if not only or name in only]


def commands() -> dict[str, str]:
    """Return the commands of `manage.py` that this tree has, of the core and of parts, each with its app."""
    return {
        path.stem: f"outbox.contrib.{path.parent.parent.parent.name}"
        for path in sorted(_folder().glob("*/management/commands/outbox_*.py"))
    }


def _folder() -> Path:
    [folder] = map(Path, outbox.contrib.__path__)
    return folder
