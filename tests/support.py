"""Helpers that tests share."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TypeVar

Value = TypeVar("Value")


def eventually(
    condition: Callable[[], Value], *, within_seconds: float = 20.0, what: str | Callable[[], str] = ""
) -> Value:
    """The first truthy value of `condition`, polled; AssertionError with its last value when time is up."""
    pause = threading.Event()
    deadline = time.monotonic() + within_seconds
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() > deadline:
            text = what() if callable(what) else what
            raise AssertionError(f"not within {within_seconds} s: {text or condition}; last value: {value!r}")
        pause.wait(0.02)
