"""The apps of the parts that this tree has, for INSTALLED_APPS of the tests, and the commands of core and parts."""

from __future__ import annotations

from pathlib import Path

from django.core.management import get_commands

import outbox.contrib

# They measure each message from the moment they are installed, so the tests about them name them.
_MEASURING = ("prometheus", "opentelemetry")


def part_apps(*only: str) -> list[str]:
    """Return the apps of the parts in the folder outbox/contrib, or of those named that are there."""
    return [f"outbox.contrib.{name}" for name in _with("apps") if (name in only if only else name not in _MEASURING)]


def has(part: str) -> bool:
    """Return whether this tree has a part: a test that uses one in passing works without it."""
    return bool(part_apps(part))


def part_urls() -> list[str]:
    """Return the modules with the addresses of the parts in the folder outbox/contrib."""
    return [f"outbox.contrib.{name}.urls" for name in _with("urls")]


def _with(module: str) -> list[str]:
    [folder] = map(Path, outbox.contrib.__path__)
    return [path.parent.name for path in sorted(folder.glob(f"*/{module}.py")) if path.parent.name != "django"]


def command_files() -> list[Path]:
    """Return the file of each command of the core and of the parts."""
    [folder] = map(Path, outbox.contrib.__path__)
    return sorted(folder.glob("*/management/commands/outbox_*.py"), key=lambda path: path.stem)


def app_of(command: str) -> str:
    """Return the app that has a command, for `load_command_class`. Settings must be configured."""
    app = get_commands()[command]
    assert isinstance(app, str)
    return app
