"""Settings: its defaults."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

APPS = ["reliable_outbox"]


def settings(databases: Mapping[str, Any]) -> dict[str, Any]:
    return {}
