"""The apps of the parts that this tree has, for INSTALLED_APPS of the tests, and the commands of core and parts."""

from __future__ import annotations

from pathlib import Path

from django.core.management import get_commands

import outbox.contrib

# They measure each message from the moment they are installed, so the tests about them name them.
_MEASURING = ("prometheus", "opentelemetry")


def part_apps(*only: str) -> list[str]:
    """Return the apps of the parts in the folder outbox/contrib, or of those named that are there."""
    [folder] = map(Path, outbox.contrib.__path__)
    there = [path.parent.name for path in sorted(folder.glob("*/apps.py")) if path.parent.name != "django"]
    return [f"outbox.contrib.{name}" for name in there if not only or name in only]


def command_files() -> list[Path]:
    """Return the file of each command of the core and of the parts."""
    [folder] = map(Path, outbox.contrib.__path__)
    return sorted(folder.glob("*/management/commands/outbox_*.py"), key=lambda path: path.stem)


def app_of(command: str) -> str:
    """Return the app that has a command, for `load_command_class`. Settings must be configured."""
    app = get_commands()[command]
    assert isinstance(app, str)
    return app
