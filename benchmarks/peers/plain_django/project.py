"""Settings: none."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

APPS: list[str] = []


def settings(databases: Mapping[str, Any]) -> dict[str, Any]:
    return {}
