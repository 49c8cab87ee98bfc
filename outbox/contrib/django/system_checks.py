"""System checks."""

from __future__ import annotations


def register_all() -> None:
    """Nothing yet."""
