"""The files of a worker's processes in OUTBOX['HEALTH_DIRECTORY']: a heartbeat of each one's loop, and metrics."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Final

from outbox.contrib.django.operations.telemetry import DIRECTORY_VARIABLE
from outbox.contrib.django.settings.conf import get_settings
from outbox.utils import heartbeat

SUFFIX: Final = ".heartbeat"
FIGURES: Final = "metrics"


def expect(names: Iterable[str]) -> dict[str, dict[str, str]]:
    """Prepare the directory for processes of these names; returns the environment variables of each.

    A former worker's files are removed. Each process gets a first heartbeat, so that one whose loop never runs is
    noticed. The variables are empty without OUTBOX['HEALTH_DIRECTORY'].
    """
    folder = get_settings().health_directory
    if folder is None:
        return {name: {} for name in names}
    figures = Path(folder) / FIGURES
    figures.mkdir(parents=True, exist_ok=True)
    for left in (*Path(folder).glob(f"*{SUFFIX}"), *figures.glob("*.db")):
        left.unlink(missing_ok=True)
    signs = {}
    for name in names:
        path = Path(folder) / f"{name}{SUFFIX}"
        path.touch()
        signs[name] = {heartbeat.VARIABLE: str(path), DIRECTORY_VARIABLE: str(figures)}
    return signs


def of_monitor() -> dict[str, str]:
    """The variables of the process that serves the others' heartbeats and metrics."""
    folder = get_settings().health_directory
    return {DIRECTORY_VARIABLE: str(Path(folder) / FIGURES)} if folder else {}
